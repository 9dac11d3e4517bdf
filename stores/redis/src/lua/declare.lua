-- Declares that the server has forgotten no lease, or reads how long it grants nothing. KEYS: epoch. ARGV: `declare`
-- or `read`, and the quarantine in ms. Answers the time that is left, in ms.

local server, known = incarnation(), epoch_of(KEYS[1])
if not known then return foreign(KEYS[1], 'record of lockkit') end
if ARGV[1] == 'declare' then
  -- Also forgets the longer ones of clients that are no more. A client that lives sends its own again.
  set_epoch(KEYS[1], server, 0, 0, tonumber(ARGV[2]))
  return 0
end
local longest = math.max(known.longest, tonumber(ARGV[2]))
if is_another(server, known) then return longest end
return math.min(longest, math.max(0, math.ceil((known.free - now) / 1000)))
