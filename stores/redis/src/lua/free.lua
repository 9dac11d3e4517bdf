-- Releases leases. KEYS: lock and row of each. ARGV: id, and least holding time in µs, of each. Answers 1 for each that
-- was held, 2 for a value without an expiry that lockkit did not write, else 0.

local answers, answered, count = {}, 0, #KEYS / 2

-- What most releases need: the lease is held, and its least holding time is over. The rest of the script is for the
-- others.
for at = 1, count do
  local name, row, id = KEYS[at * 2 - 1], KEYS[at * 2], ARGV[at * 2 - 1]
  if ARGV[at * 2] == '0' and holder_of(name) == id then
    local known = redis.pcall('GET', row)
    redis.call('DEL', name)
    -- The row of this lease, not what another program has put there.
    if type(known) == 'string' and string.sub(known, 1, 8) == VERSION
      and string.sub(known, ID_AT, ID_AT + #id - 1) == id then
      redis.call('SET', row, string.sub(known, 1, 16) .. struct.pack('<I8', now))
    end
    publish(name, row)
    answers[at], answered = 1, answered + 1
  end
end
if answered == count then return answers end
