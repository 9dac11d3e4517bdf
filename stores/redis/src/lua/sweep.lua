-- Forgets keys that had no holder for long. KEYS: names, times. ARGV: how long in µs, and how many at most. Answers how
-- many.

local function name_of(key)
  if string.sub(key, 1, 8) == 'lockkit:' then return 'lockkit::' .. key end
  return key
end

for at = 1, 2 do
  if not is_set(KEYS[at]) then return foreign(KEYS[at], 'sorted set of lockkit') end
end
local old = now - tonumber(ARGV[1])
local forgotten = 0
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. text(old), 'LIMIT', 0, ARGV[2])) do
  local row = 'lockkit:{' .. key .. '}'
  local known = fields_of(row, 'expires', 'last')
  -- A fence above the clock is kept, because the next fence of a forgotten key is made from the clock.
  local since = known and math.max(number(known[1]) or 0, last_of(known[2])) or 0
  if redis.call('EXISTS', name_of(key)) == 1 then since = math.max(since, now) end
  if since < old then
    if known then redis.call('DEL', row) end
    redis.call('ZREM', KEYS[1], key)
    redis.call('ZREM', KEYS[2], key)
    forgotten = forgotten + 1
  else
    -- A renewal does not write to the sorted set.
    redis.call('ZADD', KEYS[2], text(since), key)
  end
end
return forgotten
