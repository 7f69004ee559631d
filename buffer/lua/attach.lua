-- Gives a holder its full term and the list of what it holds, since answers may have been lost with an old stream. A
-- generator's Admit stream, or the learner's Sample stream, has (re)opened.
-- ARGV: holder, generation (generators) or incarnation (`learner`), token of the stream
load_table(ARGV[1])
load_run()
local holder = ARGV[2]
local no = outdated(holder, tonumber(ARGV[3]))
if no then return {no, snapshot()} end
redis.call('HSET', table_key .. ':streams', holder, ARGV[4])
local held = redis.call('ZRANGE', held_by(holder), 0, -1)
if #held > 0 then
  renew(holder, now_ms())
else
  -- The rest of a broken stream's term does not count for the groups that come now.
  redis.call('ZREM', table_key .. ':holders', holder)
end
local answer = {}
for _, gid in ipairs(held) do
  local g = read_group(gid)
  if holder == 'learner' then
    answer[#answer + 1] = lease_reply(gid, g)
  else
    local drafts = grant_drafts(gid, g)
    redis.call('ZADD', table_key .. ':deadline', g.deadline, gid)
    save_group(gid, g)
    answer[#answer + 1] = {gid, g.lease, g.attempt, g.ordinal, g.done, g.parent, drafts}
  end
end
return {'ok', snapshot(), naming_prompts(answer)}
