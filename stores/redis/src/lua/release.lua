-- Leases with a least holding time, those that are lost, and locks of other clients.

for at = 1, count do
  if not answers[at] then
    local name, row, id, hold = KEYS[at * 2 - 1], KEYS[at * 2], ARGV[at * 2 - 1], tonumber(ARGV[at * 2])
    local holds, it = holder_of(name), record_of(row)
    answers[at] = 0
    if holds == id then
      local is_ours = it and it.id == id
      if is_ours then lives(name, row, it) end
      local ttl = math.ceil((hold - math.max(0, now - (is_ours and it.acquired or now))) / 1000)
      if ttl > 0 then
        local nobody = NOBODY .. string.sub(id, #NOBODY + 1)
        take(name, nobody, text(ttl))
        if is_ours then
          it.id, it.used, it.ttl = nobody, now, ttl
          write(row, it)
        end
      else
        redis.call('DEL', name)
        if is_ours then redis.call('SET', row, struct.pack(FREE, VERSION, it.last, now)) end
        publish(name, row)
      end
      answers[at] = 1
    elseif holds and stranger(holds) == string.sub((string.gsub(id, '-', '')), 1, 32)
      and not (it and it.id == holds and is_id(holds)) then
      -- Another client's lock, which an operator frees. Without an expiry, it may be no lock.
      if redis.call('PTTL', name) < 0 then
        answers[at] = 2
      else
        redis.call('DEL', name)
        publish(name, row)
        answers[at] = 1
      end
    end
  end
end
return answers
