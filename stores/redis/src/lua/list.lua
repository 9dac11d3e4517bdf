-- Reads held leases. KEYS: names, epoch. ARGV: quarantine in ms, then first and last of the keys, and how many at most;
-- or one key. Answers key, id or token, whether it is an id, holder, fence, acquired, time left in ms, renewals, ttl in
-- ms or empty, now, and agreed, for each. While the server may have forgotten some of them, answers the time in ms
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
  local it = fields_of(row, 'expires', 'token', 'holder', 'fence', 'acquired', 'renewals', 'ttl', 'agreed') or {}
  local fence = text(number(it[4]) or 0)
  if it[2] == holds and is_id(holds) then
    local left, acquired = lives(name, row, it[7], it[5])
    local renewals, ttl = text(number(it[6]) or 0), number(it[7])
    found[#found + 1] = {key, holds, '1', it[3] or '', fence, text(acquired), text(left), renewals,
      ttl and text(ttl) or '', text(now), it[8] or ''}
  else
    local left = redis.call('PTTL', name)
    found[#found + 1] = {key, stranger(holds), '0', holds, fence, text(now), text(left), '0', '', text(now), ''}
  end
  return true
end

local free = quarantined(KEYS[2], tonumber(ARGV[1]), true)
if not free then return foreign(KEYS[2], 'record of lockkit') end
local left = math.ceil((free - now) / 1000)
if #ARGV == 2 then
  local is_held = see(ARGV[2])
  if is_held == nil then return foreign(name_of(ARGV[2]), 'lock of this layout') end
  if not is_held and left > 0 then return left end
  return found
end
if not is_set(KEYS[1]) then return foreign(KEYS[1], 'sorted set of lockkit') end
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
