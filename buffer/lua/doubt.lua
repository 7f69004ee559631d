-- A front saw the figures of a table go back: what was acknowledged may be lost, whatever process Redis is.
load_table(ARGV[1])
load_run()
free_first()
if R.incarnation > 0 and R.suspect ~= '1' then
  redis.call('HSET', RUN, 'suspect', 1)
  R.suspect = '1'
  touch()
end
return {'ok', view()}
