-- Beside each lock there is its row, the string lockkit:{key}. What a release leaves:
--   "lockkit1"
--   last        the last fence that belongs to the last grant
--   used        when the lease was granted, renewed or released the last time
-- and while a lease is held, or has ended without a release:
--   id          as in the lock
--   fence, acquired, ttl, renewals
--   agreed      1 if a quorum has agreed on the fence, else 0
--   before_fence, before_expired, holder, before: its holder, and the one from which the lease was taken over, with its
--               fence and expiry; before_expired is 0 if there is none
-- Numbers have 8 bytes, the lowest first; texts have their length before them, in 4 bytes. Times are in microseconds of
-- the server's clock, but for ttl, in milliseconds. A number of 2^53 or more is none of lockkit's: Lua would round it.
--
-- Of a row that exists, `lockkit:times` has a time at which it was in use; the sweep looks for the last one. Each held
-- lease is in `lockkit:names`. A release leaves it there, and the next list takes it out.

local NAMES, TIMES, EPOCH, OPEN = 'lockkit:names', 'lockkit:times', 'lockkit:epoch', 'lockkit:open'
local VERSION, FREE, HELD = 'lockkit1', '<c8I8I8', 'I4c0I8I8I8I8I8I8I8I4c0I4c0'
local FREE_LENGTH, ID_AT = 24, 29
-- How long a check of the server counts, in milliseconds. So long is a change of the eviction policy not seen.
local CHECKED = 1000

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- The key is in the name of its row.
local function key_of(row) return string.sub(row, 10, -2) end
