-- The lock is a string: the token of its holder, in hexadecimal. Any client that sends SET NX PX understands it.

-- What ids are made of, their length, and how those of no owner begin.
local ID, ID_LENGTH, NOBODY = '^[0-9a-f]+$', 32, '0000000000000000'

-- The holder. false: nobody. nil: the name has a value that is no lock.
local function holder_of(name)
  local value = redis.pcall('GET', name)
  if type(value) == 'table' then return nil end
  return value
end

-- Takes a lock that is free. Returns whether it was, and the server accepted the write.
local function take_free(name, id, ttl)
  local taken = redis.pcall('SET', name, id, 'PX', ttl, 'NX')
  return taken and taken.ok
end

-- Takes a lock that is free or has this id. A full server accepts the SET after the DEL, which needs no memory.
local function take(name, id, ttl)
  redis.call('DEL', name)
  redis.call('SET', name, id, 'PX', ttl)
end

-- Wakes waiters. Those of a user who may not publish poll.
local function publish(_, row) redis.pcall('PUBLISH', row, 'freed') end
