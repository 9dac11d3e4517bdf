-- What scripts need for all but the shortest way.

-- A time or count that another program may have changed. nil if it cannot be one.
local function number(value)
  value = tonumber(value)
  if value and value >= 0 and value < 2 ^ 53 then return value end
end

-- Numbers as text: Lua would round large ones.
local function text(number) return string.format('%.0f', number) end

local function type_of(name) return redis.call('TYPE', name).ok end

-- The error for a name with a value that lockkit did not write, which stays as it is.
local function foreign(name, expected)
  local what = '` has a value of the type ' .. type_of(name) .. ', which is no '
  return redis.error_reply('FOREIGN `' .. name .. what .. expected)
end

-- The error of a server that follows another one, after which the client looks for the master. A replica may accept
-- writes.
local function follows()
  if string.find(redis.call('INFO', 'replication'), 'role:slave', 1, true) then
    return redis.error_reply('READONLY the server follows another one now')
  end
end

-- Whether lockkit can keep a sorted set here.
local function is_set(name)
  local kind = type_of(name)
  return kind == 'zset' or kind == 'none'
end

-- The lock of a key: another name, if lockkit's own would hide it.
local function name_of(key)
  if string.sub(key, 1, 8) == 'lockkit:' then return 'lockkit::' .. key end
  return key
end

-- Whether this is the holder of a lease.
local function is_id(holder) return #holder == ID_LENGTH and string.find(holder, ID) ~= nil end

local function write(row, it)
  redis.call('SET', row, struct.pack(FREE .. HELD, VERSION, it.last, it.used, #it.id, it.id, it.fence, it.acquired,
    it.ttl, it.renewals, it.agreed, it.before_fence, it.before_expired, #it.holder, it.holder, #it.before, it.before))
end

-- Reads a row; without an id, it is the one of a lease that was released. false: there is none. nil: the name has
-- something that lockkit did not write.
local function record_of(row)
  local value = redis.pcall('GET', row)
  if value == false then return false end
  if type(value) == 'table' or #value < FREE_LENGTH or string.sub(value, 1, 8) ~= VERSION then return nil end
  local it = {}
  it.last, it.used = struct.unpack('<I8I8', value, 9)
  if #value > FREE_LENGTH then
    local is_read, behind
    is_read, it.id, it.fence, it.acquired, it.ttl, it.renewals, it.agreed, it.before_fence, it.before_expired,
      it.holder, it.before, behind = pcall(struct.unpack, '<' .. HELD, value, FREE_LENGTH + 1)
    if not is_read or behind ~= #value + 1 then return nil end
  end
  for _, field in pairs(it) do
    if type(field) == 'number' and not number(field) then return nil end
  end
  return it
end

-- When the lease expires, or was released.
local function end_of(it) return it.used + (it.ttl or 0) * 1000 end

-- Another client's lock has no token of lockkit's. It is known by a hash.
local function stranger(holder) return string.sub(redis.sha1hex(holder), 1, 32) end

-- How long the lock lives, in milliseconds. An expiry that is further away than the ttl was written before the clock
-- was set back. It is cut to the ttl.
local function lives(name, row, it)
  local left = redis.call('PTTL', name)
  if not it or not it.id or left <= it.ttl then return left end
  redis.call('PEXPIRE', name, text(it.ttl))
  it.acquired = math.max(0, it.acquired - (left - it.ttl) * 1000)
  it.used = now
  write(row, it)
  return it.ttl
end

-- Extends the expiry of a lock to the ttl, if it is nearer. Writes it even if it is not, because a full server accepts
-- the other writes of a script only after one that needs no memory.
local function extend(name, left, ttl) redis.call('PEXPIRE', name, text(math.max(left, ttl))) end
