-- Holders of groups, and since when they hold them. Changes nothing; O(holders), so it is asked on request alone.
-- Answer: per holder its id, number of groups, first group, ms since that was granted, ms left of its leases, whether
-- its stream is open. The first group is the one admitted first; the learner's is the one leased for the least version.
load_table(ARGV[1])
load_run()
local now = now_ms()
local answer = {}
local holders = redis.call('ZRANGE', table_key .. ':holders', 0, -1, 'WITHSCORES')
for i = 1, #holders, 2 do
  local holder = holders[i]
  local gid = redis.call('ZRANGE', held_by(holder), 0, 0)[1]
  if gid then
    answer[#answer + 1] = {
      holder, redis.call('ZCARD', held_by(holder)), gid, math.max(0, now - read_group(gid).leased_ms),
      math.max(0, tonumber(holders[i + 1]) - now), redis.call('HEXISTS', table_key .. ':streams', holder)
    }
  end
end
return {'ok', snapshot(), answer, run.learner}
