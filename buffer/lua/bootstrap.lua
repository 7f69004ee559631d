-- Writes the rules of a table (they come from the configuration). ARGV: table, then field, value pairs
load_table(ARGV[1])
load_run()
if R.incarnation == 0 then redis.call('HSET', RUN, 'redis_run_id', redis_id()) end
for i = 2, #ARGV, 2 do redis.call('HSET', T, ARGV[i], ARGV[i + 1]) end
return {'ok'}
