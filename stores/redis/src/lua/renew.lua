-- Extends leases. KEYS: lock and row of each. ARGV: id and ttl in ms of each. Answers 1 for each that is held, else 0.

local answers, demoted = {}, follows()
if demoted then return demoted end
for at = 1, #KEYS / 2 do
  local name, row, id, ttl = KEYS[at * 2 - 1], KEYS[at * 2], ARGV[at * 2 - 1], tonumber(ARGV[at * 2])
  answers[at] = 0
  if holder_of(name) == id then
    local it = record_of(row)
    if it and it.id ~= id then it = nil end
    local left = lives(name, row, it)
    extend(name, left, ttl)
    if it then
      if left <= ttl then it.used, it.ttl = now, ttl end
      it.renewals = it.renewals + 1
      write(row, it)
    end
    answers[at] = 1
  end
end
return answers
