-- Reads the facts of ready groups that a user's score is given; changes nothing.
-- ARGV: gids
load_table(ARGV[1])
load_run()
local answer = {}
for i = 2, #ARGV do
  local g = read_group(ARGV[i])
  if g then
    local members = {}
    for member = 0, g.n - 1 do members[member + 1] = member end
    answer[#answer + 1] = {
      ARGV[i], g.ordinal, g.deadline, use_count(g), string.format('%.17g', g.draw and g.draw.priority or 1),
      redis.call('HMGET', group_key(ARGV[i]), unpack(members))
    }
  end
end
return {'ok', snapshot(), answer}
