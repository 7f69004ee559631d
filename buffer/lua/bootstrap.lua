-- Writes the rules of a table (they come from the configuration). ARGV: table, then field, value pairs
load_table(ARGV[1])
for i = 2, #ARGV, 2 do redis.call('HSET', T, ARGV[i], ARGV[i + 1]) end
return {'ok'}
