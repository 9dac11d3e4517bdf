-- The lock is a hash with one field: the client and thread that hold it, with the number of their entries, as RLock of
-- Redisson keeps it.

local NOBODY = '00000000-0000-0000-'

-- The holder. false: nobody. nil: the name has a value that is no lock.
local function holder_of(name)
  local fields = redis.pcall('HLEN', name)
  if type(fields) == 'table' then return nil end
  if fields == 0 then return false end
  -- A lock has one field, a client and its thread, whose number may be negative. A lock for readers and writers has its mode
  -- beside them, and more to the name of a writer, as locks of transactions have.
  if fields > 64 and redis.call('HEXISTS', name, 'mode') == 0 then return nil end
  local holders = redis.call('HKEYS', name)
  for _, it in ipairs(holders) do
    if it ~= 'mode' and not string.find(it, '^.+:%-?%d+$') and not string.find(it, '^.+:%-?%d+:[%w-]+$') then return nil end
  end
  return table.concat(holders, ',')
end

-- Whether this is the holder of a lease.
local function is_id(holder) return string.find(holder, '^[0-9a-f-]+:1$') ~= nil and #holder == 38 end

local function take(name, id, ttl)
  redis.call('DEL', name)
  redis.call('HSET', name, id, '1')
  redis.call('PEXPIRE', name, ttl)
end
