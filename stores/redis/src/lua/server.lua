-- What the server may have forgotten.
--
-- `lockkit:open` says that the server was checked within the last second and grants leases: its run_id, as the client
-- of the connection knows it, the longest quarantine, and when that was. It is not replicated, so a server that follows
-- another one loses it, and one that is promoted has none; a restarted server has another run_id, if it was saved to
-- disk.

-- The server's policy and limit, if it may evict a lock.
local function evicts()
  local info = redis.call('INFO', 'memory')
  local policy, limit = string.match(info, 'maxmemory_policy:(%S+)'), string.match(info, 'maxmemory:(%d+)')
  if policy and policy ~= 'noeviction' and limit ~= '0' then return policy .. ' ' .. limit end
end

-- What makes a server another one, which may have forgotten leases: its process; the master that it followed before it
-- was promoted the last time (zeros: it never followed one, or Redis does not remember it any more); and how many keys
-- it has evicted.
local function incarnation()
  return {
    run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or '',
    former = string.match(redis.call('INFO', 'replication'), 'master_replid2:(%x+)') or '',
    evicted = number(string.match(redis.call('INFO', 'stats'), 'evicted_keys:(%d+)')) or 0,
  }
end

-- Whether the server was another one when this was written. The count of evicted keys begins again by CONFIG RESETSTAT.
local function is_another(server, known)
  return server.run ~= known.run or server.evicted > (known.evicted or server.evicted)
    or server.former ~= known.former and string.find(server.former, '[1-9a-f]') ~= nil
end

-- What is known of the server's memory. nil: the name has something that lockkit did not write.
local function epoch()
  local it = redis.pcall('HMGET', EPOCH, 'run', 'former', 'evicted', 'since', 'until', 'longest')
  if it.err or not it[1] and redis.call('EXISTS', EPOCH) == 1 then return nil end
  return {
    run = it[1], former = it[2], evicted = number(it[3]),
    since = number(it[4]) or 0, free = number(it[5]) or 0, longest = number(it[6]) or 0,
  }
end

local function set_epoch(server, since, free, longest)
  redis.call('HSET', EPOCH, 'run', server.run, 'former', server.former, 'evicted', text(server.evicted),
    'since', text(since), 'until', text(free), 'longest', text(longest))
end

-- Whether lockkit can keep its mark here.
local function is_mark(value)
  return not value or type(value) == 'string' and string.find(value, '^%x+ %d+ %d+$') ~= nil
end

-- The next claim checks the server.
local function close()
  local value = redis.pcall('GET', OPEN)
  if value and is_mark(value) then redis.call('DEL', OPEN) end
end

-- Until when nothing is granted, and the longest quarantine that any client uses. Begins the quarantine of a server
-- that is another one. nil: the name has something that lockkit did not write.
local function quarantined(quarantine)
  if quarantine == 0 then return 0, 0 end
  local server, known = incarnation(), epoch()
  if not known then return nil end
  local since, free, longest = known.since, known.free, math.max(known.longest, quarantine)
  if is_another(server, known) then
    since, free = now, now + longest * 1000
  elseif longest > known.longest and since > 0 then
    free = math.max(free, since + longest * 1000)
  elseif longest == known.longest and free <= now + longest * 1000 and server.evicted == known.evicted then
    if free > now then close() end
    return free, longest
  end
  -- The clock may have been set back.
  free = math.min(free, now + longest * 1000)
  set_epoch(server, since, free, longest)
  if free > now then close() end
  return free, longest
end

-- Says that the server was checked and grants leases. A server that is full, or does not tell its run_id, is checked
-- by each claim.
local function set_open(mark)
  if not string.find(mark, '^%x+ %d+$') then return end
  redis.set_repl(redis.REPL_NONE)
  redis.pcall('SET', OPEN, mark .. ' ' .. text(now), 'PX', CHECKED)
  redis.set_repl(redis.REPL_ALL)
end
