-- Claims that were not granted at once.

local checks, quarantine = not is_open, tonumber(string.match(mark, ' (%d+)$'))
local claims, claimed = {}, {}
for at = 1, count do
  if not answers[at] then
    local it = {
      at = at, name = KEYS[at * 2 - 1], row = KEYS[at * 2],
      id = ARGV[at * 3], holder = ARGV[at * 3 + 1], ttl = tonumber(ARGV[at * 3 + 2]),
    }
    it.holds, it.known = holder_of(it.name), record_of(it.row)
    local first = claimed[it.name]
    claimed[it.name] = first or it
    if first then
      it.refused = {first.ttl}
    elseif it.holds == nil or it.known == nil then
      if all and it.holds == nil then return foreign(it.name, 'lock of this layout') end
      if all then return foreign(it.row, 'record of lockkit') end
      -- The claim is sent again alone, and gets this error.
      it.refused = {}
    elseif not it.holds and it.known and it.known.id and end_of(it.known) > now then
      -- It ended before its time, and may have been evicted.
      checks = true
    end
    claims[#claims + 1] = it
  end
end

local free, longest = 0, quarantine
if checks then
  local demoted = follows()
  if demoted then return demoted end
  local eviction = evicts()
  if eviction then
    close()
    return redis.error_reply('EVICTS ' .. eviction)
  end
  if not is_mark(open) then return foreign(OPEN, 'mark of lockkit') end
  free, longest = quarantined(quarantine)
  if not free then return foreign(EPOCH, 'record of lockkit') end
end

-- For how long another one has the lease.
local function held_for(it)
  it.left = 0
  if not it.holds then return free > now and {math.ceil((free - now) / 1000)} or nil end
  it.left = lives(it.name, it.row, it.known and it.known.id == it.holds and it.known)
  return it.holds ~= it.id and {it.left} or nil
end

local refused = false
for _, it in ipairs(claims) do
  it.refused = it.refused or held_for(it)
  if it.refused then
    refused = true
    if all then break end
  else
    it.again = it.holds and it.known and it.known.id == it.holds
    it.next = math.max(now, it.known and it.known.last + 1 or 0)
    if not it.again and it.next + SPARE >= 2 ^ 53 then
      if all then return redis.error_reply('ERR the fence of the lock cannot rise any more') end
      it.refused = {}
    end
  end
end

-- Returns the error if the name of the sorted set has another value, or the server is full.
local function failed_to_add(set, score, row)
  local added = redis.pcall('ZADD', set, 'NX', score, key_of(row))
  if type(added) == 'number' then return nil end
  return is_set(set) and added or foreign(set, 'sorted set of lockkit')
end

-- First what can fail: the names may have other values, and the server may be full.
for _, it in ipairs(claims) do
  if not it.refused and not it.again and not (all and refused) then
    local failed = failed_to_add(NAMES, '0', it.row)
    -- For a row that exists only in case the set was lost.
    if not failed and (checks or not it.known) then failed = failed_to_add(TIMES, text(now), it.row) end
    if failed and all then return failed end
    if failed then it.refused = {} end
  end
end

for _, it in ipairs(claims) do
  local known = it.known
  if it.refused or all and refused then
    answers[it.at] = it.refused or {}
  else
    if it.again then
      extend(it.name, it.left, it.ttl)
      if it.left < it.ttl then known.used, known.ttl = now, it.ttl end
      known.renewals = known.renewals + 1
    else
      local before_fence, before_expired, before = 0, 0, ''
      if known and known.id and string.sub(known.id, 1, #NOBODY) ~= NOBODY then
        before_fence, before_expired, before = known.fence, math.min(end_of(known), now), known.holder
      end
      known = {
        last = it.next + SPARE, used = now, id = it.id, fence = it.next, acquired = now, ttl = it.ttl, renewals = 0,
        agreed = 0, before_fence = before_fence, before_expired = before_expired, holder = it.holder, before = before,
      }
    end
    write(it.row, known)
    -- Last, so that a row that cannot be written leaves no lock.
    if not it.again then take(it.name, it.id, text(it.ttl)) end
    local expired = known.before_expired > 0 and math.max(0, now - known.before_expired) or -1
    answers[it.at] = {known.fence, known.agreed, known.before, known.before_fence, expired}
  end
end
if checks and free <= now then set_open(string.gsub(mark, '%d+$', text(longest))) end
answers[count + 1] = longest
return answers
