-- Changes the weights of groups in weighted draws. ARGV: incarnation, number of the call (grows with every call of a
-- learner), then gid, priority, weight per group. A late copy does not undo what was said after it, and a repetition
-- changes nothing.
load_table(ARGV[1])
load_run()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, snapshot()} end
local changed, incarnation, call = 0, tonumber(ARGV[2]), tonumber(ARGV[3])

local function is_news(draw)
  return not draw or not draw.call or draw.by < incarnation or draw.call < call
end

for i = 4, #ARGV, 3 do
  local gid = ARGV[i]
  local g = read_group(gid)
  if g and is_news(g.draw) then
    local racing = g.state == 'ready' and counters.order == PRIORITY
    if racing then leave_ready(g) end
    g.draw = g.draw or {}
    g.draw.priority, g.draw.weight = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    g.draw.by, g.draw.call = incarnation, call
    if racing then
      set_order(gid, g)
      redis.call('ZADD', set_of('ready'), g.order, gid)
    end
    save_group(gid, g)
    changed = changed + 1
  end
end
return {'ok', snapshot(), changed}
