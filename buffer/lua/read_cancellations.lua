-- Leases that a member works on and that are not needed any more.
-- ARGV: member, generation, portion, then those of which it has been notified since, each "gid lease". Only these are
-- forgotten, so that one that is lost on the way is sent again.
load_table(ARGV[1])
load_run()
free_first()
local member = ARGV[2]
if generation_of(member) ~= tonumber(ARGV[3]) then return {'old_generation', snapshot()} end
if #ARGV > 4 then
  redis.call('SREM', cancels_key(member), unpack(ARGV, 5))
  if redis.call('SCARD', cancels_key(member)) == 0 then redis.call('ZREM', table_key .. ':cancelled_at', member) end
end
return {'ok', snapshot(), redis.call('SRANDMEMBER', cancels_key(member), tonumber(ARGV[4]))}
