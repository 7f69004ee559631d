-- Whether a member of a group may still be written by a holder; changes nothing. ARGV: gid, lease, attempt, member
-- Answer: 1 it may, 2 it is stored, 3 the right to it is gone, 4 no such member
load_table(ARGV[1])
load_run()
local g = read_group(ARGV[2])
local position = tonumber(ARGV[5]) + 1
local status = 1
if not g or g.hollow then
  status = 3
elseif position > g.n then
  status = 4
elseif g.attempt ~= tonumber(ARGV[4]) or (g.state == 'generating' and g.lease ~= ARGV[3]) then
  status = 3
elseif string.sub(g.done, position, position) == '1' then
  status = 2
end
return {'ok', view(), status}
