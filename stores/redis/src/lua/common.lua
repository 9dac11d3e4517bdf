-- Beside each lock there is a row, the hash lockkit:{key}:
--   fence, last: the fence of the last grant, and the last one that belongs to it
--   token, holder, acquired, expires, ttl, renewals: the holder; the token is empty after a release
--   before, before_fence, before_expired: the holder from which the lease was taken over, or empty
--   agreed: 1 if a quorum has agreed on the fence
-- Times are in microseconds of the server's clock, but for ttl, in milliseconds.

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Numbers as text: Lua would round large ones.
local function text(number) return string.format('%.0f', number) end

-- Another client's lock has no token of lockkit's. It is known by a hash.
local function stranger(holder) return string.sub(redis.sha1hex(holder), 1, 32) end

-- How long the lock lives, in milliseconds. An expiry that is further away than the ttl was written before the clock was
-- set back. It is cut to the ttl.
local function lives(name, row, ttl, acquired)
  local left = redis.call('PTTL', name)
  ttl = tonumber(ttl)
  if not ttl or left <= ttl then return left, acquired end
  redis.call('PEXPIRE', name, text(ttl))
  acquired = (tonumber(acquired) or now) - (left - ttl) * 1000
  redis.call('HSET', row, 'expires', text(now + ttl * 1000), 'acquired', text(acquired))
  return ttl, acquired
end

-- What makes a server another one, which may have forgotten leases: its process, and the master that it followed before
-- it was promoted the last time. Zeros: it never followed one, or Redis does not remember it any more.
local function incarnation()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
  local former = string.match(redis.call('INFO', 'replication'), 'master_replid2:(%x+)') or ''
  return run, former
end

-- Whether the server was another one when this was written.
local function is_another(run, former, known_run, known_former)
  return run ~= known_run or (former ~= known_former and string.find(former, '[1-9a-f]') ~= nil)
end

-- Until when nothing is granted, and the longest quarantine that any client asks for. Begins the quarantine of a server
-- that is another one.
local function quarantined(name, quarantine)
  if quarantine == 0 then return 0, 0 end
  local run, former = incarnation()
  local epoch = redis.call('HMGET', name, 'run', 'former', 'since', 'until', 'longest')
  local since, free, known = tonumber(epoch[3] or 0), tonumber(epoch[4] or 0), tonumber(epoch[5] or 0)
  local longest = math.max(known, quarantine)
  if is_another(run, former, epoch[1], epoch[2]) then
    since, free = now, now + longest * 1000
  elseif longest > known and since > 0 then
    free = math.max(free, since + longest * 1000)
  elseif longest == known and free <= now + longest * 1000 then
    return free, longest
  end
  -- The clock may have been set back.
  free = math.min(free, now + longest * 1000)
  redis.call('HSET', name, 'run', run, 'former', former, 'since', text(since), 'until', text(free), 'longest',
    text(longest))
  return free, longest
end
