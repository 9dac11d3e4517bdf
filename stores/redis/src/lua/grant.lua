-- Takes all of the leases or none, or each that is free.
-- KEYS: lock and row of each claim
-- ARGV: the mark of an open server (run_id, and quarantine in ms), `all` or `each`, then id, holder and ttl in ms of
-- each claim
-- Answers for each claim its fence, if nobody held the lease before; else fence, agreed, previous holder, its fence,
-- and for how long it has expired in µs, or -1; or the ms for which another one has the lease, or -1; or nothing, if it
-- was not looked at. Then, if it was read, the longest quarantine in ms.

local mark, all, count = ARGV[1], ARGV[2] == 'all', #KEYS / 2
local open = redis.pcall('GET', OPEN)
local checked = type(open) == 'string' and string.sub(open, 1, #mark) == mark and tonumber(string.sub(open, #mark + 2))
-- A clock that was set back makes the mark live longer.
local is_open = checked and checked <= now and now - checked < CHECKED * 1000
local answers, answered = {}, 0

-- What most claims need: the server was checked a moment ago, and the lease is free and was released, or is new. The
-- rest of the script is for the others. What follows the first write that the server accepts does not fail.
if is_open and (count == 1 or not all) then
  for at = 1, count do
    local name, row = KEYS[at * 2 - 1], KEYS[at * 2]
    local known = redis.pcall('GET', row)
    local is_released = known and #known == FREE_LENGTH and string.sub(known, 1, 8) == VERSION
    local last, used = 0, 0
    if is_released then last, used = struct.unpack('<I8I8', known, 9) end
    local fence = math.max(now, last + 1)
    local id, ttl = ARGV[at * 3], ARGV[at * 3 + 2]
    if (is_released or known == false) and fence + SPARE < 2 ^ 53 and used < 2 ^ 53 and take_free(name, id, ttl) then
      local added = redis.pcall('ZADD', NAMES, 'NX', '0', key_of(row))
      if type(added) == 'number' and not known then
        added = redis.pcall('ZADD', TIMES, 'NX', string.format('%.0f', now), key_of(row))
      end
      if type(added) == 'number' then
        local holder = ARGV[at * 3 + 1]
        redis.call('SET', row, struct.pack(FREE .. HELD, VERSION, fence + SPARE, now, #id, id, fence, now, ttl, 0, 0, 0,
          0, #holder, holder, 0, ''))
        answers[at], answered = fence, answered + 1
      else
        redis.call('DEL', name)
      end
    end
  end
  if answered == count then return answers end
end
