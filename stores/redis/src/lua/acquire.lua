-- Takes all of the leases or none.
-- KEYS: epoch, names, times, then lock and row of each claim
-- ARGV: quarantine in ms, spare fences, then id, holder, ttl in ms and key of each claim
-- Answers {'held', number of the claim, ms or -1, longest quarantine} or {'granted', longest quarantine, then fence,
-- agreed, previous holder, its fence and its expiry for each claim, then the time}.

local eviction = evicts()
if eviction then return redis.error_reply('EVICTS ' .. eviction) end
for at = 2, 3 do
  if not is_set(KEYS[at]) then return foreign(KEYS[at], 'sorted set of lockkit') end
end
local free, longest = quarantined(KEYS[1], tonumber(ARGV[1]))
if not free then return foreign(KEYS[1], 'record of lockkit') end
local spare = tonumber(ARGV[2])
local claims = {}
for at = 1, (#KEYS - 3) / 2 do
  local claim = {
    name = KEYS[2 + at * 2], row = KEYS[3 + at * 2],
    id = ARGV[at * 4 - 1], holder = ARGV[at * 4], ttl = tonumber(ARGV[at * 4 + 1]), key = ARGV[at * 4 + 2],
  }
  local holds = holder_of(claim.name)
  if holds == nil then return foreign(claim.name, 'lock of this layout') end
  local row = fields_of(claim.row, 'expires', 'last', 'token', 'holder', 'acquired', 'fence', 'ttl', 'agreed', 'before',
    'before_fence', 'before_expired')
  if not row then return foreign(claim.row, 'record of lockkit') end
  claim.expires, claim.last, claim.token, claim.before = number(row[1]) or 0, last_of(row[2]), row[3], row[4]
  claim.fence, claim.agreed = number(row[6]) or 0, row[8]
  claim.earlier = {row[9] or '', row[10] or '', row[11] or ''}
  claim.left = 0
  if holds then
    if holds ~= '' and holds == row[3] then claim.left = lives(claim.name, claim.row, row[7], row[5])
    else claim.left = redis.call('PTTL', claim.name) end
    if holds ~= claim.id then return {'held', tostring(at), text(claim.left), text(longest)} end
  elseif free > now then
    return {'held', tostring(at), text(math.ceil((free - now) / 1000)), text(longest)}
  end
  claim.again = holds == claim.id and holds == row[3]
  if not claim.again and math.max(now, claim.last + 1) + spare >= 2 ^ 53 then
    return redis.error_reply('ERR the fence of the lock cannot rise any more')
  end
  claims[at] = claim
end

local answer = {'granted', text(longest)}
local function add(...) for _, it in ipairs({...}) do answer[#answer + 1] = it end end
for _, it in ipairs(claims) do
  if it.again then
    if it.left < it.ttl then
      redis.call('PEXPIRE', it.name, text(it.ttl))
      redis.call('HSET', it.row, 'expires', text(now + it.ttl * 1000), 'ttl', text(it.ttl))
      redis.call('ZADD', KEYS[3], text(now + it.ttl * 1000), it.key)
    end
    -- It fails if the field is no number.
    redis.pcall('HINCRBY', it.row, 'renewals', 1)
    add(text(it.fence), it.agreed or '', unpack(it.earlier))
  else
    local fence = text(math.max(now, it.last + 1))
    local before = {'', '', ''}
    if it.token and it.token ~= '' and string.sub(it.token, 1, #NOBODY) ~= NOBODY then
      before = {it.before or '', text(it.fence), text(math.min(it.expires, now))}
    end
    redis.call('ZADD', KEYS[2], 0, it.key)
    redis.call('ZADD', KEYS[3], text(now + it.ttl * 1000), it.key)
    redis.call('HSET', it.row, 'fence', fence, 'last', text(fence + spare), 'token', it.id, 'holder', it.holder,
      'acquired', text(now), 'expires', text(now + it.ttl * 1000), 'ttl', text(it.ttl), 'renewals', '0', 'agreed', '',
      'before', before[1], 'before_fence', before[2], 'before_expired', before[3])
    -- Last, so that a row that cannot be written leaves no lock.
    take(it.name, it.id, text(it.ttl))
    add(fence, '', unpack(before))
  end
end
add(text(now))
return answer
