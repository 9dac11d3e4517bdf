-- The lock is a hash with one field: the client and thread that hold it, with the number of their entries, as RLock of
-- Redisson keeps it.

-- What ids are made of, their length, and how those of no owner begin.
local ID, ID_LENGTH, NOBODY = '^[0-9a-f-]+:1$', 38, '00000000-0000-0000-'

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

-- Takes a lock that is free. Returns whether it was, and the server accepted the write.
local function take_free(name, id, ttl)
  if redis.call('EXISTS', name) == 1 or type(redis.pcall('HSET', name, id, '1')) ~= 'number' then return false end
  redis.call('PEXPIRE', name, ttl)
  return true
end

-- Takes a lock that is free or has this id. A full server accepts the HSET after the DEL, which needs no memory.
local function take(name, id, ttl)
  redis.call('DEL', name)
  redis.call('HSET', name, id, '1')
  redis.call('PEXPIRE', name, ttl)
end

-- Wakes waiters, on the channel of Redisson. Those of a user who may not publish poll.
local function publish(name)
  local tag = string.find(name, '{', 1, true) and name or '{' .. name .. '}'
  redis.pcall('PUBLISH', 'redisson_lock__channel:' .. tag, '0')
end
