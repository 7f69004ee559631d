-- Who holds groups, and since when. Changes nothing; O(holders), so it is asked where somebody looks, not all the time.
-- Answer: per holder its id, how many groups it holds, the one admitted first (of the learner's: leased for the least
-- version), ms since that one was granted, ms left of its leases, whether its stream is open
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
