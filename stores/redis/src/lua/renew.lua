-- Extends leases. KEYS: lock and row of each. ARGV: id and ttl in ms of each. Answers 1 for each that is held, else 0.

local answers = {}
for at = 1, #KEYS / 2 do
  local name, row, id, ttl = KEYS[at * 2 - 1], KEYS[at * 2], ARGV[at * 2 - 1], tonumber(ARGV[at * 2])
  answers[at] = 0
  if holder_of(name) == id then
    local known = fields_of(row, 'expires', 'ttl', 'acquired')
    if lives(name, row, known and known[2], known and known[3]) <= ttl then
      redis.call('PEXPIRE', name, text(ttl))
      if known then redis.call('HSET', row, 'expires', text(now + ttl * 1000), 'ttl', text(ttl)) end
    end
    -- It fails if the field is no number.
    if known and known[1] then redis.pcall('HINCRBY', row, 'renewals', 1) end
    answers[at] = 1
  end
end
return answers
