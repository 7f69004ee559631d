-- Says if a holder may still write a member of a group, as `write` would say; changes nothing.
-- ARGV: gid, lease, attempt, member.
-- Answer: 1 it may, 2 it is stored, 3 the right to it is gone, 4 no such member
load_table(ARGV[1])
load_run()
local lease, attempt, member = ARGV[3], ARGV[4], ARGV[5]
local g = read_group(ARGV[2])
local position = tonumber(member) + 1
local status = 1
if not g or g.n == 0 then
  status = 3
elseif position > g.n then
  status = 4
elseif not may_write(g, lease, attempt) then
  status = has_stored(g, member, attempt) and 2 or 3
elseif is_done(g, position) then
  status = 2
end
return {'ok', snapshot(), status}
