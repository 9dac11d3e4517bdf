-- Reads held leases. ARGV: quarantine in ms, then first and last of the keys, and how many at most; or one key. Answers
-- where the next list goes on, or nothing if all keys were seen, then of each lease key, id or token, whether it is an
-- id, holder, fence, acquired, how long it is held, time left in ms, renewals, ttl in ms or -1, and agreed. While the
-- server may have forgotten some of them, answers the time in ms until the quarantine ends.

-- How many names one list looks at. Released ones are among them.
local LOOKED_AT = 1000

local found = {''}
-- Returns whether the key is held, if `all`, also by another client. nil: its name has a value that is no lock of this
-- layout.
local function see(key, all)
  local name, row = name_of(key), 'lockkit:{' .. key .. '}'
  local holds = holder_of(name)
  if not holds then return holds end
  local it = record_of(row)
  -- A lease whose row was lost is still one.
  if not all and (not is_id(holds) or it and it.id ~= holds) then return false end
  if it and it.id == holds and is_id(holds) then
    local left = lives(name, row, it)
    found[#found + 1] = {key, holds, 1, it.holder, it.fence, it.acquired, math.max(0, now - it.acquired), left,
      it.renewals, it.ttl, it.agreed}
  else
    found[#found + 1] = {key, stranger(holds), 0, holds, 0, now, 0, redis.call('PTTL', name), 0, -1, 0}
  end
  return true
end

local demoted = follows()
if demoted then return demoted end
local free = quarantined(tonumber(ARGV[1]))
if not free then return foreign(EPOCH, 'record of lockkit') end
local left = math.ceil((free - now) / 1000)
if #ARGV == 2 then
  local is_held = see(ARGV[2], true)
  if is_held == nil then return foreign(name_of(ARGV[2]), 'lock of this layout') end
  if not is_held and left > 0 then return left end
  return found
end
if not is_set(NAMES) then return foreign(NAMES, 'sorted set of lockkit') end
if left > 0 then return left end
local limit, gone = tonumber(ARGV[4]), {}
local keys = redis.call('ZRANGEBYLEX', NAMES, ARGV[2], ARGV[3], 'LIMIT', 0, LOOKED_AT)
for _, key in ipairs(keys) do
  if #found > limit then break end
  if see(key, false) == false then gone[#gone + 1] = key end
end
-- They were released, or expired, or others have them. The next list need not look at them.
if #gone > 0 then redis.call('ZREM', NAMES, unpack(gone)) end
if #keys == LOOKED_AT and #found <= limit then found[1] = '(' .. keys[#keys] end
return found
