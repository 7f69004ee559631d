-- Prompts are keys in other slots. `prompts` has the digest of each one in use, by ordinal: in use it is while its task is
-- pending, its group lives, or its note keeps it. Ordinal and digest name the key, so that no one can put other bytes in
-- its place: neither a learner of the past, nor one that gives an ordinal again after a loss.
local function prompts_key() return T .. ':prompts' end

-- Rows of an answer, which have an ordinal as their fourth item, with the name of its prompt there.
local function naming_prompts(rows)
  for first = 1, #rows, 1000 do
    local ordinals = {}
    for i = first, math.min(first + 999, #rows) do ordinals[#ordinals + 1] = rows[i][4] end
    for i, digest in ipairs(redis.call('HMGET', prompts_key(), unpack(ordinals))) do
      rows[first + i - 1][4] = ordinals[i] .. ':' .. (digest or '')
    end
  end
  return rows
end

-- The name of a prompt that is in use no more, as `trash` has it; nothing where none was seeded.
local function drop_prompt(ordinal)
  local digest = redis.call('HGET', prompts_key(), ordinal)
  if not digest then return '' end
  redis.call('HDEL', prompts_key(), ordinal)
  return ordinal .. ':' .. digest
end
