-- Raises the fence of held leases to the one that a quorum agreed on. KEYS: lock and row of each. ARGV: spare fences,
-- then id and fence of each. Answers the number of leases that are held with this fence.

local held = 0
for at = 1, #KEYS / 2 do
  local name, row, id, fence = KEYS[at * 2 - 1], KEYS[at * 2], ARGV[at * 2], tonumber(ARGV[at * 2 + 1])
  local known = redis.call('HMGET', row, 'fence', 'token', 'agreed', 'last')
  if holder_of(name) == id and known[2] == id and (known[3] ~= '1' or tonumber(known[1]) <= fence) then
    local last = math.max(fence + ARGV[1], tonumber(known[4] or 0))
    redis.call('HSET', row, 'fence', text(fence), 'last', text(last), 'agreed', '1')
    held = held + 1
  end
end
return held
