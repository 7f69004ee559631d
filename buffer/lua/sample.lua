-- Leases proposed ready groups to the learner for one version; re-checks state, bound and quota of each.
-- ARGV: incarnation, for_version, token of the stream, gids...
load_table(ARGV[1])
load_run()
free_first()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, snapshot()} end
if replaced('learner', ARGV[4]) then return {'replaced', snapshot()} end
local version = tonumber(ARGV[3])
local now = now_ms()
local room = NO_BOUND
if counters.bounded == 1 then
  room = counters.groups_per_step - redis.call('ZCOUNT', set_of('leased'), version, version)
  if version < counters.u then room = 0 end
end
local answer = {}
for i = 5, #ARGV do
  local gid = ARGV[i]
  local g = read_group(gid)
  if #answer < room and g and g.state == 'ready' and g.deadline >= version then
    if counters.order == PRIORITY then
      -- Absent where the run went by another order when it became ready.
      g.draw = g.draw or {}
      g.draw.chance = weight_of(g) / counters.weight
      put('race', math.max(counters.race, g.order))
      leave_ready(g)
    end
    leave(set_of('ready'), gid)
    leave(waiting_set(g), gid)
    enter(set_of('leased'), gid, ARGV[3])
    add('ready', -1)
    add('leased', 1)
    g.state, g.holder, g.lease, g.for_version, g.leased_ms = 'leased', 'learner', new_lease('s'), version, now
    save_group(gid, g)
    answer[#answer + 1] = lease_reply(gid, g)
  end
end
if #answer > 0 then redis.call('ZADD', table_key .. ':holders', 'NX', now + counters.lease_ms, 'learner') end
return {'ok', snapshot(), naming_prompts(answer)}
