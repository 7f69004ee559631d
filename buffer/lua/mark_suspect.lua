-- A front saw the revision of a table go back: what was acknowledged may be lost, whatever process Redis is.
-- ARGV: the revision it had seen; a learner may have spoken meanwhile, and then the present one is higher.
load_table(ARGV[1])
load_run()
free_first()
if counters.rev < tonumber(ARGV[2]) and run.incarnation > 0 and not run.suspect then
  mark_suspect()
  touch()
end
return {'ok', snapshot()}
