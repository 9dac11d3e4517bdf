-- Takes all of the leases or none.
-- KEYS: epoch, names, times, then lock and row of each claim
-- ARGV: 1 if the server must be checked, quarantine in ms, spare fences, then id, holder, ttl in ms and key of each
-- claim
-- Answers {'held', number of the claim, ms or -1, longest quarantine} or {'granted', longest quarantine, then fence,
-- agreed, previous holder, its fence and its expiry for each claim, then the time}.
-- A check costs more than the rest of a claim. A lock that ended before its time may have been evicted.

local checks, quarantine, spare = ARGV[1] == '1', tonumber(ARGV[2]), tonumber(ARGV[3])
local claims = {}
for at = 1, (#KEYS - 3) / 2 do
  local claim = {
    name = KEYS[2 + at * 2], row = KEYS[3 + at * 2],
    id = ARGV[at * 4], holder = ARGV[at * 4 + 1], ttl = tonumber(ARGV[at * 4 + 2]), key = ARGV[at * 4 + 3],
  }
  claim.holds = holder_of(claim.name)
  if claim.holds == nil then return foreign(claim.name, 'lock of this layout') end
  claim.known = fields_of(claim.row, 'expires', 'last', 'token', 'holder', 'acquired', 'fence', 'ttl', 'agreed',
    'before', 'before_fence', 'before_expired', 'renewals')
  if not claim.known then return foreign(claim.row, 'record of lockkit') end
  claim.expires = number(claim.known[1]) or 0
  if not claim.holds and (claim.known[3] or '') ~= '' and claim.expires > now then checks = true end
  claims[at] = claim
end

local eviction = checks and evicts()
if eviction then return redis.error_reply('EVICTS ' .. eviction) end
local free, longest = quarantined(KEYS[1], quarantine, checks)
if not free then return foreign(KEYS[1], 'record of lockkit') end
for at, it in ipairs(claims) do
  local known = it.known
  it.left = 0
  if it.holds then
    if it.holds ~= '' and it.holds == known[3] then it.left = lives(it.name, it.row, known[7], known[5])
    else it.left = redis.call('PTTL', it.name) end
    if it.holds ~= it.id then return {'held', tostring(at), text(it.left), text(longest)} end
  elseif free > now then
    return {'held', tostring(at), text(math.ceil((free - now) / 1000)), text(longest)}
  end
  it.again = it.holds == it.id and it.holds == known[3]
  it.next = math.max(now, last_of(known[2]) + 1)
  if not it.again and it.next + spare >= 2 ^ 53 then
    return redis.error_reply('ERR the fence of the lock cannot rise any more')
  end
end

-- First what can fail: the names may have other values, and the server may be full.
local function failed_to_add(set, score, key)
  local added = redis.pcall('ZADD', set, 'NX', score, key)
  if type(added) == 'number' then return nil end
  return is_set(set) and added or foreign(set, 'sorted set of lockkit')
end
for _, it in ipairs(claims) do
  if not it.again then
    local failed = failed_to_add(KEYS[2], 0, it.key)
    -- For a row that exists only in case the set was lost.
    if not failed and (checks or not it.known[1]) then failed = failed_to_add(KEYS[3], text(now), it.key) end
    if failed then return failed end
  end
end

local answer = {'granted', text(longest)}
local function add(...) for _, it in ipairs({...}) do answer[#answer + 1] = it end end
for _, it in ipairs(claims) do
  local known = it.known
  local expires = text(now + it.ttl * 1000)
  if it.again then
    if it.left < it.ttl then
      redis.call('PEXPIRE', it.name, text(it.ttl))
      redis.call('HSET', it.row, 'expires', expires, 'ttl', text(it.ttl))
    end
    -- It fails if the field is no number.
    redis.pcall('HINCRBY', it.row, 'renewals', 1)
    add(text(number(known[6]) or 0), known[8] or '', known[9] or '', known[10] or '', known[11] or '')
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
    add(fence, '', before[1], before[2], before[3])
  end
end
add(text(now))
return answer
