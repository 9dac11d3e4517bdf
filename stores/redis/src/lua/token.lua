-- The lock is a string: the token of its holder, in hexadecimal. Any client that sends SET NX PX understands it.

local NOBODY = '0000000000000000'

-- The holder. false: nobody. nil: the name has a value that is no lock.
local function holder_of(name)
  local value = redis.pcall('GET', name)
  if type(value) == 'table' then return nil end
  return value
end

-- Whether this is the holder of a lease.
local function is_id(holder) return string.find(holder, '^[0-9a-f]+$') ~= nil and #holder == 32 end

local function take(name, id, ttl)
  redis.call('SET', name, id, 'PX', ttl)
end
