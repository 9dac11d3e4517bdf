-- Declares that the server has forgotten no lease, or reads how long it grants nothing. ARGV: `declare` or `read`, and
-- the quarantine in ms. Answers the time that is left, in ms.

local demoted = follows()
if demoted then return demoted end
local server, known = incarnation(), epoch()
if not known then return foreign(EPOCH, 'record of lockkit') end
if ARGV[1] == 'declare' then
  -- Also forgets the longer ones of clients that are no more. A client that lives sends its own again.
  close()
  set_epoch(server, 0, 0, tonumber(ARGV[2]))
  return 0
end
local longest = math.max(known.longest, tonumber(ARGV[2]))
if is_another(server, known) then return longest end
return math.min(longest, math.max(0, math.ceil((known.free - now) / 1000)))
