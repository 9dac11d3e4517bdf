-- Raises the fence of held leases to the one that a quorum agreed on. KEYS: lock and row of each. ARGV: spare fences,
-- then id and fence of each. Answers the number of leases that are held with this fence.

local held = 0
for at = 1, #KEYS / 2 do
  local name, row, id, fence = KEYS[at * 2 - 1], KEYS[at * 2], ARGV[at * 2], tonumber(ARGV[at * 2 + 1])
  local known = fields_of(row, 'expires', 'fence', 'token', 'agreed', 'last')
  if known and holder_of(name) == id and known[3] == id and (known[4] ~= '1' or (number(known[2]) or 0) <= fence) then
    local last = math.max(fence + ARGV[1], last_of(known[5]))
    redis.call('HSET', row, 'fence', text(fence), 'last', text(last), 'agreed', '1')
    held = held + 1
  end
end
return held
