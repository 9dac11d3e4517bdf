-- Forgets keys that had no holder for long. KEYS: names, times. ARGV: how long in µs, and how many to look at.
-- Answers how many were forgotten, and how many were looked at. None of these is found again before it is as old.

local function name_of(key)
  if string.sub(key, 1, 8) == 'lockkit:' then return 'lockkit::' .. key end
  return key
end

for at = 1, 2 do
  if not is_set(KEYS[at]) then return foreign(KEYS[at], 'sorted set of lockkit') end
end
local old = now - tonumber(ARGV[1])
local forgotten = 0
local keys = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. text(old), 'LIMIT', 0, ARGV[2])
for _, key in ipairs(keys) do
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
    -- Only a new row writes to the sorted set. A row whose fence is no number may be repaired.
    redis.call('ZADD', KEYS[2], text(since == math.huge and now or since), key)
  end
end
return {forgotten, #keys}
