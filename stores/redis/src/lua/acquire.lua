-- Takes all of the leases or none, or each that is free.
-- KEYS: epoch, names, times, then lock and row of each claim
-- ARGV: 1 if the server must be checked, quarantine in ms, spare fences, `all` or `each`, then id, holder, ttl in ms and
-- key of each claim
-- Answers the longest quarantine, then fence, agreed, previous holder, its fence and its expiry for each claim, then the
-- time. A claim without a fence was not granted: if its lease is held, ms or -1 follow, and else it was not looked at.
-- A check costs more than the rest of a claim. A lock that ended before its time may have been evicted.

local checks, quarantine, spare, all = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == 'all'
local claims = {}
for at = 1, (#KEYS - 3) / 2 do
  local claim = {
    name = KEYS[2 + at * 2], row = KEYS[3 + at * 2],
    id = ARGV[at * 4 + 1], holder = ARGV[at * 4 + 2], ttl = tonumber(ARGV[at * 4 + 3]), key = ARGV[at * 4 + 4],
  }
  claim.holds = holder_of(claim.name)
  claim.known = fields_of(claim.row, 'expires', 'last', 'token', 'holder', 'acquired', 'fence', 'ttl', 'agreed',
    'before', 'before_fence', 'before_expired', 'renewals')
  if claim.holds == nil or not claim.known then
    if all and claim.holds == nil then return foreign(claim.name, 'lock of this layout') end
    if all then return foreign(claim.row, 'record of lockkit') end
    -- The claim is sent again alone, and gets this error.
    claim.refused = ''
  else
    claim.expires = number(claim.known[1]) or 0
    if not claim.holds and (claim.known[3] or '') ~= '' and claim.expires > now then checks = true end
  end
  claims[at] = claim
end

local eviction = checks and evicts()
if eviction then return redis.error_reply('EVICTS ' .. eviction) end
local free, longest = quarantined(KEYS[1], quarantine, checks)
if not free then return foreign(KEYS[1], 'record of lockkit') end

-- In ms how long another one has the lease.
local function held_for(it)
  it.left = 0
  if not it.holds then return free > now and text(math.ceil((free - now) / 1000)) or nil end
  local known = it.known
  if it.holds ~= '' and it.holds == known[3] then it.left = lives(it.name, it.row, known[7], known[5])
  else it.left = redis.call('PTTL', it.name) end
  return it.holds ~= it.id and text(it.left) or nil
end

local refused = false
for _, it in ipairs(claims) do
  it.refused = it.refused or held_for(it)
  if it.refused then
    refused = true
    if all then break end
  else
    it.again = it.holds == it.id and it.holds == it.known[3]
    it.next = math.max(now, last_of(it.known[2]) + 1)
    if not it.again and it.next + spare >= 2 ^ 53 then
      return redis.error_reply('ERR the fence of the lock cannot rise any more')
    end
  end
end
local granted = {}
for _, it in ipairs(claims) do
  if not it.refused and not (all and refused) then granted[#granted + 1] = it end
end

-- First what can fail: the names may have other values, and the server may be full.
local function failed_to_add(set, score, key)
  local added = redis.pcall('ZADD', set, 'NX', score, key)
  if type(added) == 'number' then return nil end
  return is_set(set) and added or foreign(set, 'sorted set of lockkit')
end
for _, it in ipairs(granted) do
  if not it.again then
    local failed = failed_to_add(KEYS[2], 0, it.key)
    -- For a row that exists only in case the set was lost.
    if not failed and (checks or not it.known[1]) then failed = failed_to_add(KEYS[3], text(now), it.key) end
    if failed then return failed end
  end
end

for _, it in ipairs(granted) do
  local known = it.known
  local expires = text(now + it.ttl * 1000)
  if it.again then
    if it.left < it.ttl then
      redis.call('PEXPIRE', it.name, text(it.ttl))
      redis.call('HSET', it.row, 'expires', expires, 'ttl', text(it.ttl))
    end
    -- It fails if the field is no number.
    redis.pcall('HINCRBY', it.row, 'renewals', 1)
    it.grant = {text(number(known[6]) or 0), known[8] or '', known[9] or '', known[10] or '', known[11] or ''}
  else
    local fence, before = text(it.next), {'', '', ''}
    if known[3] and known[3] ~= '' and string.sub(known[3], 1, #NOBODY) ~= NOBODY then
      before = {known[4] or '', text(number(known[6]) or 0), text(math.min(it.expires, now))}
    end
    redis.call('HSET', it.row, 'fence', fence, 'last', text(it.next + spare), 'token', it.id, 'holder', it.holder,
      'acquired', text(now), 'expires', expires, 'ttl', text(it.ttl))
    if (known[12] or '0') ~= '0' or (known[8] or '') ~= '' then
      redis.call('HSET', it.row, 'renewals', '0', 'agreed', '')
    end
    if before[2] ~= '' or (known[10] or '') ~= '' then
      redis.call('HSET', it.row, 'before', before[1], 'before_fence', before[2], 'before_expired', before[3])
    end
    -- Last, so that a row that cannot be written leaves no lock.
    take(it.name, it.id, text(it.ttl))
    it.grant = {fence, '', before[1], before[2], before[3]}
  end
end

local answer = {text(longest)}
for _, it in ipairs(claims) do
  for _, field in ipairs(it.grant or {'', it.refused or '', '', '', ''}) do answer[#answer + 1] = field end
end
answer[#answer + 1] = text(now)
return answer
