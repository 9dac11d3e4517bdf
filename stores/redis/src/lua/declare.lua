-- Declares that the server has forgotten no lease, or asks how long it grants nothing. KEYS: epoch. ARGV: `declare` or
-- `ask`, and the quarantine in ms. Answers the time that is left, in ms.

local this = incarnation()
local epoch = redis.call('HMGET', KEYS[1], 'incarnation', 'until', 'longest')
local longest = math.max(tonumber(epoch[3] or 0), tonumber(ARGV[2]))
if ARGV[1] == 'declare' then
  redis.call('HSET', KEYS[1], 'incarnation', this, 'since', '0', 'until', '0', 'longest', text(longest))
  return 0
end
if epoch[1] ~= this then return longest end
return math.min(longest, math.max(0, math.ceil((tonumber(epoch[2] or 0) - now) / 1000)))
