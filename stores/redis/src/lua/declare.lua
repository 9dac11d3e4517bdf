-- Declares that the server has forgotten no lease, or asks how long it grants nothing. KEYS: epoch. ARGV: `declare` or
-- `ask`, and the quarantine in ms. Answers the time that is left, in ms.

local run, former = incarnation()
local epoch = redis.call('HMGET', KEYS[1], 'run', 'former', 'until', 'longest')
local longest = math.max(tonumber(epoch[4] or 0), tonumber(ARGV[2]))
if ARGV[1] == 'declare' then
  redis.call('HSET', KEYS[1], 'run', run, 'former', former, 'since', '0', 'until', '0', 'longest', text(longest))
  return 0
end
if is_another(run, former, epoch[1], epoch[2]) then return longest end
return math.min(longest, math.max(0, math.ceil((tonumber(epoch[3] or 0) - now) / 1000)))
