-- Lists the commands of the scripts that Redis refuses to our user, found out on a key that holds nothing. Asked at the
-- start, because a script that is refused a command in its middle has done half of its work.
-- ARGV: names of the commands
local refused = {}
for _, name in ipairs(ARGV) do
  local words, why = {}, nil
  repeat
    local reply = redis.pcall(name, unpack(words))
    why = type(reply) == 'table' and reply.err or ''
    words[#words + 1] = #words == 0 and KEYS[1] .. ':none' or '0'
  until #words > 6 or not string.find(why, 'Wrong number of args', 1, true)
  if string.find(why, "executing the script can't", 1, true) or string.find(why, 'ACL failure', 1, true) then
    refused[#refused + 1] = name
  end
end
redis.pcall('DEL', KEYS[1] .. ':none')
return refused
