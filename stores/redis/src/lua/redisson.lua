-- The lock is a hash with one field: the client and thread that hold it, with the number of their entries, as RLock of
-- Redisson keeps it.

local NOBODY = '00000000-0000-0000-'

-- The holder. false: nobody. nil: the name has a value that is no lock.
local function holder_of(name)
  local fields = redis.pcall('HLEN', name)
  if type(fields) == 'table' then return nil end
  if fields == 0 then return false end
  -- A lock has one field, or three if it is a lock for readers and writers.
  if fields > 64 then return nil end
  return table.concat(redis.call('HKEYS', name), ',')
end

local function take(name, id, ttl)
  redis.call('DEL', name)
  redis.call('HSET', name, id, '1')
  redis.call('PEXPIRE', name, ttl)
end
