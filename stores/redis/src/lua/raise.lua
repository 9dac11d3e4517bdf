-- Raises the fence of held leases to the one that a quorum agreed on. KEYS: lock and row of each. ARGV: id and fence of
-- each. Answers the number of leases that are held with this fence.

local raised = 0
for at = 1, #KEYS / 2 do
  local name, row, id, fence = KEYS[at * 2 - 1], KEYS[at * 2], ARGV[at * 2 - 1], tonumber(ARGV[at * 2])
  local it = record_of(row)
  if it and it.id == id and holder_of(name) == id and (it.agreed ~= 1 or it.fence <= fence) then
    it.last, it.fence, it.agreed = math.max(fence + SPARE, it.last), fence, 1
    write(row, it)
    raised = raised + 1
  end
end
return raised
