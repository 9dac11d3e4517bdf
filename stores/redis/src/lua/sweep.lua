-- Forgets keys that had no holder for long. ARGV: how long in µs, and how many to look at. Answers how many were
-- forgotten, and how many were looked at. None of these is found again before it is as old.

for _, name in ipairs({NAMES, TIMES}) do
  if not is_set(name) then return foreign(name, 'sorted set of lockkit') end
end
local old = now - tonumber(ARGV[1])
local forgotten = 0
local keys = redis.call('ZRANGEBYSCORE', TIMES, '-inf', '(' .. text(old), 'LIMIT', 0, ARGV[2])
for _, key in ipairs(keys) do
  local row = 'lockkit:{' .. key .. '}'
  local it = record_of(row)
  -- A fence above the clock is kept, because the next fence of a forgotten key is made from the clock.
  local since = it and math.max(end_of(it), it.last) or 0
  if redis.call('EXISTS', name_of(key)) == 1 then since = math.max(since, now) end
  if since < old then
    if it then redis.call('DEL', row) end
    redis.call('ZREM', NAMES, key)
    redis.call('ZREM', TIMES, key)
    forgotten = forgotten + 1
  else
    -- Only a new row writes to the sorted set. A full server accepts the ZADD after the ZREM, which needs no memory.
    redis.call('ZREM', TIMES, key)
    redis.call('ZADD', TIMES, text(since), key)
  end
end
return {forgotten, #keys}
