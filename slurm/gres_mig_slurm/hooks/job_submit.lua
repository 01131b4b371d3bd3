--[[
gres-mig: turns what a user asks of migmem into what it counts on a node, and refuses what can never be had.

It lies beside slurm.conf as job_submit.lua (JobSubmitPlugins=lua), and beside it lie gres-mig-sizes.conf, which
`gres-mig slurm profiles` writes, job_submit.gates.lua, if nodes have gates, and job_submit.site.lua, if the site has a
script of its own: its functions are called first, under their usual names. All are read anew when they change.
What the user wrote is kept in AdminComment, which users cannot set, as `gres-mig:1:8000`: the hooks go by that.

For Lua 5.1 to 5.4. On Slurm 22.05 tres_per_node is "gres:migmem:8000,gres:gpu:1", on newer ones "gres/…".
]]

local FOLDER = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local SIZES_FILE = FOLDER .. "gres-mig-sizes.conf"
local GATES_FILE = FOLDER .. "job_submit.gates.lua"
local SITE_FILE = FOLDER .. "job_submit.site.lua"

-- Not handed to Lua before 23.02; slurm_errno.h.
local INVALID_GRES = slurm.ESLURM_INVALID_GRES or 2072
local INVALID_FEATURE = slurm.ESLURM_INVALID_FEATURE or 2029
local NO_VAL = 4294967294
local EXAMPLES = "write MiB, such as migmem:8000, or migmem:8K for 8,192"
local OTHER_FORMS = { "tres_per_task", "tres_per_socket", "tres_per_job" }

-- A refusal is thrown, so that it ends the work from wherever it is found; whatever else is thrown is a fault of ours.
local Refusal = {}
local function refuse(text, ...)
  error(setmetatable({ text = string.format(text, ...) }, Refusal), 0)
end

local function read(path)
  local file, why = io.open(path, "r")
  if not file then
    return nil, why
  end
  local text, fault = file:read("*a")
  file:close()
  return text, fault
end

local function thousands(number)
  local text, more = string.format("%.0f", number), 1
  while more > 0 do
    text, more = text:gsub("^(%d+)(%d%d%d)", "%1,%2")
  end
  return text
end

local function shown(text)
  text = text:gsub("[^ -~]", "?")
  return #text > 40 and text:sub(1, 37) .. "..." or text
end

-- Types of nodes with their boards, and all profiles in one list; nil and the line that is not understood.
local function parse_sizes(text)
  local sizes = { exclusive = "refuse", types = {}, profiles = {} }
  local format, node, board
  for line in text:gmatch("[^\n]+") do
    local word, rest = line:match("^(%l+) (.+)$")
    local name, memory, price, use = line:match("^profile (%S+) (%d+) (%d+) (%l+)$")
    if word == "format" then
      format = rest
    elseif word == "exclusive" or word == "placeholders" then
      sizes[word] = rest
    elseif word == "type" then
      node, board = { boards = {} }, nil
      table.insert(sizes.types, node)
    elseif (word == "nodes" or word == "admission" or word == "machines") and node then
      node[word] = rest
    elseif word == "board" and node then
      board = { whole = tonumber(rest:match("^%d+ (%d+)")) }
      table.insert(node.boards, board)
    elseif word == "slices" and board and board.whole and rest:find("^%d+$") then
      board.overhead = tonumber(rest)
      sizes.largest_slice = math.max(sizes.largest_slice or 0, board.whole - board.overhead)
    elseif name and board then
      local profile = { name = name, memory = tonumber(memory), price = tonumber(price), by_size = use == "size" }
      table.insert(board, profile)
      table.insert(sizes.profiles, profile)
    elseif line:find("[^%s]") and not line:find("^#") then
      return nil, line
    end
  end
  if format ~= "1" or #sizes.profiles == 0 and not sizes.largest_slice then
    return nil, format == "1" and "it has no sizes" or "its format is not 1"
  end
  return sizes
end

local function load_sizes()
  local text, why = read(SIZES_FILE)
  local sizes
  if text then
    sizes, why = parse_sizes(text)
    why = why and SIZES_FILE .. " is not understood: " .. shown(why)
  end
  if not sizes then
    local remedy = "gres-mig slurm profiles --write " .. SIZES_FILE
    slurm.log_error("gres-mig: %s; run: %s", why, remedy)
    refuse("migmem is not set up on this cluster (%s); its admin has to run: %s", why, remedy)
  end
  return sizes
end

-- The generic resources in a text, which ones are migmem, and the count of those as it was written.
local function entries(tres)
  local found = {}
  for text in ((tres or "") .. ","):gmatch("([^,]*),") do
    local prefix, rest = text:match("^(%s*gres[:/])(.*)$")
    local name, count = (rest or text):match("^%s*([%w_]+)[:=]?(.-)%s*$")
    local ours = name ~= nil and name:lower() == "migmem"
    table.insert(found, { text = text, prefix = prefix or "", ours = ours, count = count })
  end
  return found
end

local function one_of(found)
  local ours
  for _, entry in ipairs(found) do
    if entry.ours and ours then
      refuse("migmem was asked for twice: a job has one instance on each of its nodes; for several, submit an array")
    end
    ours = entry.ours and entry or ours
  end
  return ours
end

-- What the writer of "8G" or "8000MB" most likely meant.
local function correction(text)
  local number, unit = text:match("^(%d+%.?%d*)([kKmMgGtT]?)[iI]?[bB]?$")
  local mib_per = { K = 1024, M = 1, G = 1024, T = 1024 * 1024 }
  if not number or #number > 9 or tonumber(number) == 0 then
    return EXAMPLES
  end
  local mib = math.ceil(tonumber(number) * (mib_per[unit:upper()] or 1))
  local kibi = mib % 1024 == 0 and string.format("%.0fK or ", mib / 1024) or ""
  return string.format("write %s%.0f", kibi, mib)
end

local function refuse_text(text, sizes)
  if text == "" then
    refuse("migmem needs a size: %s", EXAMPLES)
  elseif text:find("^%d") and not text:find("^%d+g%.") then
    refuse("migmem counts MiB, and %s is no number of them: %s", shown(text), correction(text))
  end
  local names, seen = {}, {}
  for _, profile in ipairs(sizes.profiles) do
    if profile.by_size and not seen[profile.name] then
      seen[profile.name] = true
      table.insert(names, profile.name)
    end
  end
  local listed = #names > 0 and ", or one of " .. table.concat(names, ", ") or ""
  refuse("migmem:%s is no size and no profile of this cluster: %s%s", shown(text), EXAMPLES, listed)
end

-- "mig:8000" will have nothing less than a MIG instance: no slice of a GPU that is shared.
local function parse_request(text, sizes)
  local insists = text:match("^[mM][iI][gG][:=]")
  text = insists and text:sub(#insists + 1) or text
  local name = text:gsub(":1$", ""):lower() -- Slurm's own form for a type, with its count
  for _, profile in ipairs(sizes.profiles) do
    if profile.name:lower() == name then
      return { profile = profile.name, original = profile.name }
    end
  end
  local number, unit = text:match("^0*(%d-)([kK]?)$")
  if not number or not text:find("^%d") then
    refuse_text(text, sizes)
  elseif number == "" then
    refuse("migmem:%s asks for nothing: leave it out, or %s", shown(text), EXAMPLES)
  end
  local mib = #number < 13 and tonumber(number) * (unit == "" and 1 or 1024) or math.huge
  return { mib = mib, insists = insists, original = (insists and "mig:" or "") .. number .. unit:upper() }
end

local function served_by(board, request)
  local best
  if board.overhead and request.mib and not request.insists and request.mib + board.overhead <= board.whole then
    best = { name = "a slice", memory = request.mib, price = request.mib + board.overhead }
  end
  for _, profile in ipairs(board) do
    local fits = request.mib and profile.by_size and profile.memory >= request.mib
    local better = profile.name == request.profile or (fits and (not best or profile.memory < best.memory))
    best = better and profile or best
  end
  return best
end

-- The least that any type of node counts for it: a job has one count wherever it starts, and more than a type's own
-- would leave it waiting there for a place that is free. Also the nodes on which it can never be had.
local function price(request, sizes)
  local least, unable = nil, {}
  for _, node in ipairs(sizes.types) do
    local able = false
    for _, board in ipairs(node.boards) do
      local profile = served_by(board, request)
      able = able or profile ~= nil
      least = profile and (not least or profile.price < least.price) and profile or least
    end
    if not able then
      table.insert(unable, node.nodes)
    end
  end
  return least, unable
end

local function priced(text, sizes)
  local request = parse_request(text, sizes)
  request.serves, request.unable = price(request, sizes)
  if request.serves then
    return request
  end
  local slice = not request.insists and sizes.largest_slice
  local largest = slice and { name = "a slice", memory = slice }
  for _, profile in ipairs(sizes.profiles) do
    largest = profile.by_size and (not largest or profile.memory > largest.memory) and profile or largest
  end
  local asked = request.mib < 1e12 and thousands(request.mib) or shown(text)
  local most = largest and string.format("%s (%s MiB)", largest.name, thousands(largest.memory)) or "none"
  return refuse("migmem: %s MiB is more than any GPU of this cluster gives; the largest is %s", asked, most)
end

-- Without it jobs are let in by their count alone.
local function load_gates()
  local chunk, why = loadfile(GATES_FILE)
  if not chunk then
    slurm.log_error("gres-mig: no job has a gate: %s; run: gres-mig slurm setup --write", why)
  end
  return chunk and chunk(served_by)
end

local function refuse_other_forms(job_desc)
  for _, form in ipairs(OTHER_FORMS) do
    if one_of(entries(job_desc[form])) then
      refuse("migmem is asked for by node, not by %s: --gres=migmem:8000", form:match("%l+$"))
    end
  end
end

local function kept(comment)
  comment = comment or ""
  return comment:match("^gres%-mig:1:(%S+)"), comment:find("^gres%-mig:1:%S+ gres%-mig:gated") ~= nil
end

-- Our words first, then what somebody else put there.
local function comment_with(original, gated, comment)
  local rest = (comment or ""):gsub("gres%-mig:%d+:%S*%s*", ""):gsub("gres%-mig:gated%s*", "")
  return "gres-mig:1:" .. original .. (gated and " gres-mig:gated" or "") .. (rest == "" and "" or " " .. rest)
end

local function count(job_desc, found, ours, request)
  ours.text = ours.prefix .. string.format("migmem:%.0f", request.serves.price)
  local text
  for _, entry in ipairs(found) do
    text = (text and text .. "," or "") .. entry.text
  end
  job_desc.tres_per_node = text
end

-- A node whose GPUs are all too small may count enough for it nevertheless.
local function exclude(job_desc, nodes, unable)
  for _, each in ipairs(unable) do
    nodes = nodes and nodes ~= "" and nodes .. "," .. each or each
    job_desc.exc_nodes = nodes
  end
end

-- The placeholders among nodes as Slurm writes them, such as "n1,migmem-full-n1-[1-4]".
local function placeholders_in(nodes)
  local found = {}
  local first, last = nodes:find("migmem%-full%-")
  while first do
    local more = last
    while more do
      last = more
      more = select(2, nodes:find("^[%w._-]+", last + 1)) or select(2, nodes:find("^%b[]", last + 1))
    end
    table.insert(found, nodes:sub(first, last))
    first, last = nodes:find("migmem%-full%-", last + 1)
  end
  return found
end

-- Of a job of more nodes than there are, Slurm thinks that it could begin once the placeholders are up, and lets no
-- other job of its partition begin before (22.05). So who may need several and has no gate is kept off them.
local function keep_off(job_desc, nodes, part_list)
  local least, tasks = job_desc.min_nodes or NO_VAL, job_desc.num_tasks or NO_VAL
  if (least <= 1 or least == NO_VAL) and (tasks <= 1 or tasks == NO_VAL) then
    return
  end
  local found, seen = {}, {}
  for _, part in pairs(part_list) do
    for _, each in ipairs(placeholders_in(part.nodes or "")) do
      if not seen[each] then
        seen[each] = true
        table.insert(found, each)
      end
    end
  end
  exclude(job_desc, nodes, found)
end

local function submit(job_desc, part_list)
  refuse_other_forms(job_desc)
  local found = entries(job_desc.tres_per_node)
  local ours = one_of(found)
  if not ours then
    if kept(job_desc.admin_comment) then
      job_desc.admin_comment = ""
    end
    keep_off(job_desc, job_desc.exc_nodes, part_list)
    return
  end
  if (job_desc.het_job_offset or NO_VAL) ~= NO_VAL then
    refuse("migmem cannot be had by a heterogeneous job: submit its components as jobs of their own")
  end
  local sizes = load_sizes()
  local request = priced(ours.count, sizes)
  if job_desc.shared == 0 and sizes.exclusive ~= "allow" then
    refuse("--exclusive takes all migmem of a node for one instance: leave out --exclusive or migmem")
  end
  count(job_desc, found, ours, request)
  exclude(job_desc, job_desc.exc_nodes, request.unable)
  local gates = sizes.placeholders and load_gates()
  local gated = gates and gates.submit(job_desc, request, sizes)
  if not gated then
    keep_off(job_desc, job_desc.exc_nodes, part_list)
  end
  job_desc.admin_comment = comment_with(request.original, gated, job_desc.admin_comment)
  local serves = request.serves
  if request.mib ~= serves.price then
    local asked = request.mib and thousands(request.mib) .. " MiB" or request.profile
    local counted, holds = thousands(serves.price), thousands(serves.memory)
    slurm.log_user("migmem: %s counts as %s MiB: what %s (%s MiB) takes of a GPU", asked, counted, serves.name, holds)
  end
end

-- The request of a waiting job changes only together with AdminComment, so that slurmctld itself, which lets none but
-- root and operators set that, refuses what others try. To say the same again is everybody's.
local function modify(job_desc, job_rec, part_list, modify_uid)
  refuse_other_forms(job_desc)
  local original, gated = kept(job_rec.admin_comment)
  if job_desc.admin_comment and original and not kept(job_desc.admin_comment) then
    job_desc.admin_comment = comment_with(original, gated, job_desc.admin_comment)
  end
  local found = entries(job_desc.tres_per_node)
  local ours, now = one_of(found), one_of(entries(job_rec.tres_per_node))
  local gates = gated and load_gates()
  local keeps = ours or (now and not job_desc.tres_per_node)
  local has_gate, stuck
  if gates then
    has_gate, stuck = gates.modify(job_desc, job_rec, keeps, load_sizes)
  end
  if not has_gate then
    keep_off(job_desc, job_desc.exc_nodes or job_rec.exc_nodes, part_list)
  end
  if stuck then
    error(setmetatable({ text = stuck, code = INVALID_FEATURE }, Refusal), 0)
  end
  if not ours or (now and now.count == ours.count) then
    return
  end
  local sizes = load_sizes()
  local request = priced(ours.count, sizes)
  count(job_desc, found, ours, request)
  if request.original ~= original then
    if modify_uid ~= 0 then
      slurm.log_user("migmem: only root and operators change what a waiting job asks for: cancel it and submit again")
    end
    exclude(job_desc, job_desc.exc_nodes or job_rec.exc_nodes, request.unable)
    gated = gates and gates.resize(job_desc, job_rec, request, sizes)
    job_desc.admin_comment = comment_with(request.original, gated, job_desc.admin_comment or job_rec.admin_comment)
  end
end

-- Whatever goes wrong in here is no matter of jobs without migmem.
local function guarded(work, job_desc, ...)
  local done, fault = pcall(work, job_desc, ...)
  if done then
    return slurm.SUCCESS
  end
  if getmetatable(fault) == Refusal then
    slurm.log_info("gres-mig: refused: %s", fault.text)
    slurm.log_user("%s", fault.text) -- in slurm_job_modify it reaches nobody before 23.02
    return fault.code or INVALID_GRES
  end
  slurm.log_error("gres-mig: internal error in job_submit.lua: %s", tostring(fault))
  local told, ours = pcall(function()
    return (job_desc.tres_per_node or ""):lower():find("migmem", 1, true)
  end)
  if told and ours then
    slurm.log_user("migmem: an internal error of the submit plugin, told in slurmctld's log; tell your admin")
    return INVALID_GRES
  end
  return slurm.SUCCESS
end

local site = {}

local function run_site(text)
  assert((loadstring or load)(text, "@" .. SITE_FILE))()
end

-- As slurmctld does with a script of its own: one that does not load leaves the one before it in force.
local function load_site(first)
  local text = read(SITE_FILE)
  if text == site.text and not first then
    return
  end
  site.text = text
  local submits, modifies = slurm_job_submit, slurm_job_modify
  slurm_job_submit, slurm_job_modify = nil, nil
  local loaded, why = pcall(run_site, text or "")
  if loaded then
    site.submit, site.modify = slurm_job_submit, slurm_job_modify
  end
  slurm_job_submit, slurm_job_modify = submits, modifies
  if not loaded and first then
    error(why, 0)
  elseif not loaded then
    slurm.log_error("gres-mig: %s, using previous script", tostring(why))
  end
end

local function ask_site(name, ...)
  local result = site[name] and site[name](...)
  return type(result) == "number" and result or slurm.SUCCESS
end

load_site(true)

-- The site's script is looked for at submit alone: that there is none leaves an errno behind for which slurmctld would
-- refuse another partition of a waiting job (22.05).
function slurm_job_submit(job_desc, part_list, submit_uid)
  load_site(false)
  local result = ask_site("submit", job_desc, part_list, submit_uid)
  return result == slurm.SUCCESS and guarded(submit, job_desc, part_list) or result
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  local result = ask_site("modify", job_desc, job_rec, part_list, modify_uid)
  return result == slurm.SUCCESS and guarded(modify, job_desc, job_rec, part_list, modify_uid) or result
end

return slurm.SUCCESS
