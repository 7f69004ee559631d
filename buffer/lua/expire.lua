-- The sweep: leases that have run out end, in portions; members that fell silent are forgotten.
-- After a restart of Redis no holder could renew, so each gets one full term.
-- ARGV: portion, member ttl in ms
-- Answer: its last value says whether there may be more, so that the next portion is due at once.
load_table(ARGV[1])
load_run()
free_first()
local now = now_ms()
local restarted = detect_restart(now) and 1 or 0
local portion, lost, returned = tonumber(ARGV[2]), 0, 0
local over = redis.call('ZRANGEBYSCORE', table_key .. ':holders', '-inf', now, 'LIMIT', 0, 16)
for _, holder in ipairs(over) do
  for _, gid in ipairs(redis.call('ZRANGE', held_by(holder), 0, portion - 1)) do
    if end_lease(gid, read_group(gid), 1) then returned = returned + 1 else lost = lost + 1 end
  end
  apply_moves()
  if redis.call('ZCARD', held_by(holder)) == 0 then redis.call('ZREM', table_key .. ':holders', holder) end
end
local silent = redis.call('ZRANGEBYSCORE', RUN .. ':heartbeats', '-inf', now - tonumber(ARGV[3]), 'LIMIT', 0, 16)
for _, member in ipairs(silent) do forget(member) end
local more = (#over == 16 or #silent == 16) and 1 or 0
return {'ok', snapshot(), lost, returned, restarted, more}
