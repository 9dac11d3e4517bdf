-- Beside each lock there is a row, the hash lockkit:{key}:
--   fence, last: the fence of the last grant, and the last one that belongs to it
--   token, holder, acquired, expires, ttl, renewals: the holder; the token is empty after a release
--   before, before_fence, before_expired: the holder from which the lease was taken over; none, or empty
--   agreed: 1 if a quorum has agreed on the fence
-- Of a row that exists, `lockkit:times` has a time at which it was in use; the sweep looks for the last one.
-- Times are in microseconds of the server's clock, but for ttl, in milliseconds.

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Numbers as text: Lua would round large ones.
local function text(number) return string.format('%.0f', number) end

-- A time, fence or count of a row. nil for anything else: another program may have changed the row.
local function number(value)
  value = tonumber(value)
  if value and value >= 0 and value < 2 ^ 53 then return value end
end

-- The last fence of a row. What is no number is above all fences, so that none is given twice.
local function last_of(value)
  if not value then return 0 end
  return number(value) or math.huge
end

local function type_of(name) return redis.call('TYPE', name).ok end

-- The error for a name with a value that lockkit did not write, which stays as it is.
local function foreign(name, expected)
  local what = '` has a value of the type ' .. type_of(name) .. ', which is no '
  return redis.error_reply('FOREIGN `' .. name .. what .. expected)
end

-- Whether lockkit can keep a sorted set here.
local function is_set(name)
  local kind = type_of(name)
  return kind == 'zset' or kind == 'none'
end

-- Fields of a hash of lockkit's, first the one that it always has. All are false if there is no hash. nil: the name has
-- something that lockkit did not write.
local function fields_of(name, always, ...)
  local fields = redis.pcall('HMGET', name, always, ...)
  if fields.err then
    if type_of(name) ~= 'hash' then return nil end
    return redis.call('HMGET', name, always, ...)
  end
  if not fields[1] and redis.call('EXISTS', name) == 1 then return nil end
  return fields
end

-- Another client's lock has no token of lockkit's. It is known by a hash.
local function stranger(holder) return string.sub(redis.sha1hex(holder), 1, 32) end

-- How long the lock lives, in milliseconds. An expiry that is further away than the ttl was written before the clock was
-- set back. It is cut to the ttl.
local function lives(name, row, ttl, acquired)
  local left = redis.call('PTTL', name)
  ttl, acquired = number(ttl), number(acquired) or now
  if not ttl or left <= ttl then return left, acquired end
  redis.call('PEXPIRE', name, text(ttl))
  acquired = acquired - (left - ttl) * 1000
  redis.call('HSET', row, 'expires', text(now + ttl * 1000), 'acquired', text(acquired))
  return ttl, acquired
end

-- The server's policy and limit, if it may evict a lock.
local function evicts()
  local info = redis.call('INFO', 'memory')
  local policy, limit = string.match(info, 'maxmemory_policy:(%S+)'), string.match(info, 'maxmemory:(%d+)')
  if policy and policy ~= 'noeviction' and limit ~= '0' then return policy .. ' ' .. limit end
end

local function former_master()
  return string.match(redis.call('INFO', 'replication'), 'master_replid2:(%x+)') or ''
end

-- Whether the server was promoted since this was written.
local function was_promoted(former, known)
  return former ~= known.former and string.find(former, '[1-9a-f]') ~= nil
end

-- What makes a server another one, which may have forgotten leases: its process; the master that it followed before it
-- was promoted the last time (zeros: it never followed one, or Redis does not remember it any more); and how many keys
-- it has evicted.
local function incarnation()
  return {
    run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or '',
    former = former_master(),
    evicted = number(string.match(redis.call('INFO', 'stats'), 'evicted_keys:(%d+)')) or 0,
  }
end

-- Whether the server was another one when this was written. The count of evicted keys begins again by CONFIG RESETSTAT.
local function is_another(server, known)
  return server.run ~= known.run or server.evicted > (known.evicted or server.evicted)
    or was_promoted(server.former, known)
end

-- What is known of the server's memory. nil: the name has something that lockkit did not write.
local function epoch_of(name)
  local it = fields_of(name, 'run', 'former', 'evicted', 'since', 'until', 'longest')
  return it and {
    run = it[1], former = it[2], evicted = number(it[3]),
    since = number(it[4]) or 0, free = number(it[5]) or 0, longest = number(it[6]) or 0,
  }
end

local function set_epoch(name, server, since, free, longest)
  redis.call('HSET', name, 'run', server.run, 'former', server.former, 'evicted', text(server.evicted),
    'since', text(since), 'until', text(free), 'longest', text(longest))
end

-- Until when nothing is granted, and the longest quarantine that any client uses. Begins the quarantine of a server
-- that is another one. One that was promoted may keep its clients, so each call looks for that; the rest is for calls
-- that check. nil: the name has something that lockkit did not write.
local function quarantined(name, quarantine, checks)
  if quarantine == 0 then return 0, 0 end
  local known = epoch_of(name)
  if not known then return nil end
  if not checks and known.run and known.longest == quarantine and known.free <= now
    and not was_promoted(former_master(), known) then return 0, quarantine end
  local server = incarnation()
  local since, free, longest = known.since, known.free, math.max(known.longest, quarantine)
  if is_another(server, known) then
    since, free = now, now + longest * 1000
  elseif longest > known.longest and since > 0 then
    free = math.max(free, since + longest * 1000)
  elseif longest == known.longest and free <= now + longest * 1000 and server.evicted == known.evicted then
    return free, longest
  end
  -- The clock may have been set back.
  free = math.min(free, now + longest * 1000)
  set_epoch(name, server, since, free, longest)
  return free, longest
end
