--[[
gres-mig: a job's gate, the part of its constraint that lets it begin only on nodes that say they have a place for it.

job_submit.lua runs this where gres-mig-sizes.conf says that nodes have gates (`admission gates`). Such a node has two
features for each size: `migmem-9856` is active while it has a place for 9,856 MiB that is kept for nobody, and
`migmem-9856-try` while it wants to see a batch job of that size without that. A job's gate is of all sizes that hold
what it asks for, on whatever type of node, and comes last in its constraint. AdminComment says that it has one, as
`gres-mig:1:8000 gres-mig:gated`.
]]

local served_by = ...
local NO_VAL = 4294967294
local gates = {}

-- None where a type without gates, or a slice of any size, can serve it, for there are no such features, and none for
-- what Slurm would refuse at submit while all gates are closed: a job that names its nodes or a reservation, or of more
-- nodes than placeholders.
local function features_for(request, sizes, job, batch)
  local nodes = job.min_nodes or NO_VAL
  local named = (job.req_nodes or "") ~= "" or (job.reservation or "") ~= ""
  if named or (nodes ~= NO_VAL and nodes > tonumber(sizes.placeholders)) then
    return nil
  end
  local found, seen = {}, {}
  for _, node in ipairs(sizes.types) do
    for _, board in ipairs(node.boards) do
      local profile = served_by(board, request)
      if profile and (node.admission ~= "gates" or board.overhead) then
        return nil
      elseif profile and not seen[profile.memory] then
        seen[profile.memory] = true
        local feature = string.format("migmem-%.0f", profile.memory)
        table.insert(found, batch and feature .. "|" .. feature .. "-try" or feature)
      end
    end
  end
  return table.concat(found, "|")
end

-- Slurm reads & and | from left to right and knows one level of brackets (22.05). What counts nodes is joined to nothing
-- that it would heed.
local function joined(own, features)
  if own == "" then
    return features
  elseif own:find("*", 1, true) then
    return nil
  elseif own:find("|", 1, true) and not own:find("[%[%(]") then
    own = "(" .. own .. ")"
  end
  return own .. "&" .. (features:find("|", 1, true) and "(" .. features .. ")" or features)
end

-- What its user wrote of a constraint, and its gate.
local function parted(constraint)
  constraint = constraint or ""
  local own, features = constraint:match("^(.*)&%(?(migmem%-%d[%w|-]*)%)?$")
  if not own and constraint:find("^migmem%-%d[%w|-]*$") then
    own, features = "", constraint
  end
  return own or constraint, features
end

-- Gives a new job its gate; whether it has one now.
function gates.submit(job_desc, request, sizes)
  local features = features_for(request, sizes, job_desc, job_desc.script ~= nil)
  local constraint = features and joined(job_desc.features or "", features)
  if constraint then
    job_desc.features = constraint
  end
  return constraint ~= nil
end

-- Gives a waiting job that has a gate another size; whether it has one now.
function gates.resize(job_desc, job_rec, request, sizes)
  local own, features = parted(job_desc.features or job_rec.features)
  if not features then
    return false
  end
  local other = features_for(request, sizes, {}, features:find("-try", 1, true) ~= nil)
  job_desc.features = other and joined(own, other) or own
  return other ~= nil
end

-- A waiting job keeps its gate with another constraint, and loses it together with migmem, as far as Lua can: to set
-- nothing changes nothing (22.05), so that who wrote no constraint says `Gres= Features=`.
function gates.modify(job_desc, job_rec, ours)
  local own, features = parted(job_rec.features)
  local given, other = parted(job_desc.features or own)
  local changed = given
  if ours and job_desc.features and not other then
    changed = joined(given, features) or given
  end
  if features and changed ~= "" and (job_desc.features or not ours) then
    job_desc.features = changed
  end
end

return gates
