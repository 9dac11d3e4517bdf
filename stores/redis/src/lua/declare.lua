-- Declares that the server has forgotten no lease, or asks how long it grants nothing. KEYS: epoch. ARGV: `declare` or
-- `ask`, and the quarantine in ms. Answers the time that is left, in ms.

local run, former = incarnation()
local epoch = redis.call('HMGET', KEYS[1], 'run', 'former', 'until', 'longest')
if ARGV[1] == 'declare' then
  -- Also forgets the longer ones of clients that are no more. A client that lives tells its own again.
  redis.call('HSET', KEYS[1], 'run', run, 'former', former, 'since', '0', 'until', '0', 'longest', ARGV[2])
  return 0
end
local longest = math.max(tonumber(epoch[4] or 0), tonumber(ARGV[2]))
if is_another(run, former, epoch[1], epoch[2]) then return longest end
return math.min(longest, math.max(0, math.ceil((tonumber(epoch[3] or 0) - now) / 1000)))
