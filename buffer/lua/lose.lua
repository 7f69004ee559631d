-- Ends live groups whose prompt or payload is gone. ARGV: gid, lease per group
load_table(ARGV[1])
load_run()
free_first()
for i = 2, #ARGV, 2 do
  local g = read_group(ARGV[i])
  if g and g.lease == ARGV[i + 1] then give_up(ARGV[i], g, 'failed', 'payload_lost') end
end
return {'ok', view()}
