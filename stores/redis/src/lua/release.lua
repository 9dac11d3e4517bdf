-- Releases leases. KEYS: names, then lock and row of each. ARGV: type of the channel's message, then id, token,
-- least holding time in µs, id of nobody, key and channel of each. Answers 1 for each that was held, 2 for a
-- value without an expiry that lockkit did not write, else 0.

local answers = {}
for at = 1, (#KEYS - 1) / 2 do
  local name, row = KEYS[at * 2], KEYS[1 + at * 2]
  local id, token, hold, nobody, key, channel = unpack(ARGV, at * 6 - 4, at * 6 + 1)
  local holds = holder_of(name)
  answers[at] = 0
  if holds then
    local known = fields_of(row, 'expires', 'token', 'acquired', 'ttl')
    local ours = holds == id
    -- Another client's lock, which an operator frees. Without an expiry, it may be no lock.
    local is_lease = known and holds == known[2] and is_id(holds)
    local strangers = not ours and not is_lease and stranger(holds) == token
    if strangers and redis.call('PTTL', name) < 0 then
      answers[at] = 2
    elseif ours or strangers then
      local left = 0
      if ours and hold ~= '0' then
        local _, acquired = lives(name, row, known and known[4], known and known[3])
        left = tonumber(hold) - math.max(0, now - acquired)
      end
      -- The sorted set only finds keys. If its name has another value, the release goes on.
      if left > 0 then
        local ttl = math.ceil(left / 1000)
        take(name, nobody, text(ttl))
        if known then redis.call('HSET', row, 'token', nobody, 'expires', text(now + ttl * 1000), 'ttl', text(ttl)) end
      else
        redis.call('DEL', name)
        redis.pcall('ZREM', KEYS[1], key)
        if ours and known then redis.call('HSET', row, 'token', '', 'expires', text(now)) end
        -- Not allowed to publish: waiters poll.
        redis.pcall('PUBLISH', channel, ARGV[1])
      end
      answers[at] = 1
    end
  end
end
return answers
