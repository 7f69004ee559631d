-- Shared by `write` and `member`: who may write a member, and who has.
local function is_done(g, position) return string.sub(g.done, position, position) == '1' end

local function holds(g, lease, attempt)
  return not g.hollow and g.attempt == tonumber(attempt) and (g.state ~= 'generating' or g.lease == lease)
end

local function has_stored(g, member, attempt)
  return string.find(',' .. g.payloads .. ',', ',' .. member .. ':' .. attempt .. '[,:]') ~= nil
end
