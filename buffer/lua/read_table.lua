-- The snapshot of a table; changes nothing. Answer: the greatest ordinal seeded
load_table(ARGV[1])
load_run()
return {'ok', snapshot(), counters.seeded}
