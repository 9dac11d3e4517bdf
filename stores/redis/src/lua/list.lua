-- Reads held leases. KEYS: names, epoch. ARGV: quarantine in ms, then first and last of the keys, and how many at most;
-- or one key. Answers key, id or token, whether it is an id, holder, fence, acquired, time left in ms, renewals, ttl in
-- ms or empty, now, and agreed, for each. While the server may have forgotten what is asked for, answers the time in ms
-- until the quarantine ends.

-- The names of locks that lockkit's own keys would hide.
local function name_of(key)
  if string.sub(key, 1, 8) == 'lockkit:' then return 'lockkit::' .. key end
  return key
end

local found = {}
-- Returns whether the key is held. nil: its name has a value that is no lock of this layout.
local function see(key)
  local name, row = name_of(key), 'lockkit:{' .. key .. '}'
  local holds = holder_of(name)
  if not holds then return holds end
  local it = redis.call('HMGET', row, 'token', 'holder', 'fence', 'acquired', 'renewals', 'ttl', 'agreed')
  if holds ~= '' and it[1] == holds then
    local left, acquired = lives(name, row, it[6], it[4])
    found[#found + 1] = {key, holds, '1', it[2], it[3], text(acquired), text(left), it[5], it[6], text(now), it[7] or ''}
  else
    local left = redis.call('PTTL', name)
    found[#found + 1] = {key, stranger(holds), '0', holds, it[3] or '0', text(now), text(left), '0', '', text(now), ''}
  end
  return true
end

local free = quarantined(KEYS[2], tonumber(ARGV[1]))
local left = math.ceil((free - now) / 1000)
if #ARGV == 2 then
  if not see(ARGV[2]) and left > 0 then return left end
  return found
end
if left > 0 then return left end
local limit, gone = tonumber(ARGV[4]), {}
local first = ARGV[2]
while #found < limit do
  local keys = redis.call('ZRANGEBYLEX', KEYS[1], first, ARGV[3], 'LIMIT', 0, 500)
  for _, key in ipairs(keys) do
    if #found == limit then break end
    if see(key) == false then gone[#gone + 1] = key end
  end
  if #keys < 500 then break end
  first = '(' .. keys[#keys]
end
-- They expired. The next list need not look at them.
for at = 1, #gone, 500 do
  redis.call('ZREM', KEYS[1], unpack(gone, at, math.min(at + 499, #gone)))
end
return found
