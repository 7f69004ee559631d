-- The sweep: leases that have run out end, in portions; members that fell silent are forgotten.
-- After a restart of Redis nobody could renew, so everyone gets one full term. ARGV: portion, member ttl in ms
load_table(ARGV[1])
load_run()
free_first()
local now = now_ms()
local restarted = recognize(now) and 1 or 0
local portion, lost, returned = tonumber(ARGV[2]), 0, 0
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', T .. ':holders', '-inf', now, 'LIMIT', 0, 16)) do
  local held = {}
  for i, gid in ipairs(redis.call('SRANDMEMBER', held_by(holder), portion)) do held[i] = {gid, read_group(gid)} end
  -- By admission, so that the notes of those that fail are in an order.
  table.sort(held, function(a, b) return number_of(a[1]) < number_of(b[1]) end)
  for _, pair in ipairs(held) do
    local gid, g = pair[1], pair[2]
    if g.state == 'leased' then
      make_ready(gid, g)
      save_group(gid, g)
      returned = returned + 1
    else
      orphan(gid, g, 1)
      lost = lost + 1
    end
  end
  if redis.call('SCARD', held_by(holder)) == 0 then redis.call('ZREM', T .. ':holders', holder) end
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', RUN .. ':heartbeats', '-inf', now - tonumber(ARGV[3]), 'LIMIT', 0, 16)) do
  forget(member)
end
return {'ok', view(), lost, returned, restarted}
