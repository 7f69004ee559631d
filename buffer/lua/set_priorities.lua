-- Changes the weights of groups in weighted draws. ARGV: incarnation, then gid, priority, weight per group
load_table(ARGV[1])
load_run()
local no = refusal(tonumber(ARGV[2]))
if no then return {no, view()} end
local changed = 0
for i = 3, #ARGV, 3 do
  local gid = ARGV[i]
  local g = read_group(gid)
  if g then
    local racing = g.state == 'ready' and C.order == PRIORITY
    if racing then leave_ready(g) end
    g.draw = g.draw or {}
    g.draw.priority, g.draw.weight = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    if racing then
      take_place(gid, g)
      redis.call('ZADD', set_of('ready'), g.order, gid)
    end
    save_group(gid, g)
    changed = changed + 1
  end
end
return {'ok', view(), changed}
